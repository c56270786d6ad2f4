"""The integration tests' conftest (fixtures, `write_conversations`) and the modules beside it, for these tests too."""

import importlib.util
import sys
from pathlib import Path

HERE = Path(__file__).parents[1] / "integration"
sys.path.append(str(HERE))
_spec = importlib.util.spec_from_file_location("integration_conftest", HERE / "conftest.py")
assert _spec and _spec.loader
conftest = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = conftest
_spec.loader.exec_module(conftest)
