"""Other tools' states, read in place: what is there is indexed once, then read by range like a store.

    founding.py      data_*.pt by torch.save: the founding story's
    specforge.py     SpecForge's data_*.ckpt and .ckpt.gz
    speculators.py   speculators 0.9: an arrow dataset and hs_*.safetensors, bf16 or fp8
    deepspec.py      DeepSpec's shards

A format is a module with NAME, WHAT, `files(folder)`, `jobs(folder, files)`, `look(...)`; `torchzip.py` finds tensors
in a torch.save file without running anything of it, `index.py` keeps what was found, `processes.py` looks at many files
on every core, `source.py` reads. Where `look` is a `functools.partial` it can be sent to a process.
"""
