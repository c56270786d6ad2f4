"""Limits and events of a cgroup, in the same words for both versions."""

from __future__ import annotations

from pathlib import Path

from eyas.why import probe


def write(root: Path, files: dict[str, str]) -> None:
    for name, body in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(body)


def test_version_2_takes_the_tightest_limit_on_the_way_up(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "cgroup.events": "populated 1\nfrozen 0\n",
            "job/memory.max": "8000000\n",
            "job/cpu.max": "150000 100000\n",
            "job/cpu.stat": "usage_usec 9\nnr_periods 10\nnr_throttled 4\nthrottled_usec 2000000\n",
            "job/step/memory.max": "max\n",
            "job/step/memory.current": "7000000\n",
            "job/step/memory.events": "low 0\nhigh 3\nmax 12\noom 1\noom_kill 2\n",
            "job/step/memory.stat": "anon 5\nfile 6\nworkingset_refault_file 7\n",
            "job/step/cpu.max": "max 100000\n",
            "job/step/cpu.stat": "usage_usec 5000000\n",
            "job/step/cgroup.events": "populated 1\nfrozen 1\n",
        },
    )
    places = {"2": (str(tmp_path / "job/step"), str(tmp_path))}
    facts = probe.cgroup_facts(places)
    assert facts["version"] == 2
    assert (facts["memory"]["max"], facts["memory"]["current"], facts["memory"]["events"]["oom_kill"]) == (
        8000000,
        7000000,
        2,
    )
    assert (
        facts["cpu"]["quota_cpus"],
        facts["cpu"]["nr_throttled"],
        facts["cpu"]["throttled_s"],
        facts["cpu"]["usage_s"],
    ) == (1.5, 4, 2.0, 5.0)
    assert facts["frozen"] is True
    assert probe.cgroup_counters(places)["refault_file"] == 7


def test_version_1_speaks_the_same_words(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "memory/a/memory.limit_in_bytes": "1000000\n",
            "memory/a/b/memory.limit_in_bytes": "9223372036854771712\n",
            "memory/a/b/memory.usage_in_bytes": "999\n",
            "memory/a/b/memory.failcnt": "5\n",
            "memory/a/b/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
            "memory/a/b/memory.stat": "cache 1\ntotal_rss 10\ntotal_cache 20\ntotal_workingset_refault_file 30\n",
            "cpu/cpu.cfs_quota_us": "-1\n",
            "cpu/a/cpu.cfs_quota_us": "50000\n",
            "cpu/a/cpu.cfs_period_us": "100000\n",
            "cpu/a/cpu.stat": "nr_periods 8\nnr_throttled 6\nthrottled_time 1500000000\n",
            "freezer/a/freezer.state": "FROZEN\n",
        },
    )
    places = {
        "memory": (str(tmp_path / "memory/a/b"), str(tmp_path / "memory")),
        "cpu": (str(tmp_path / "cpu/a"), str(tmp_path / "cpu")),
        "freezer": (str(tmp_path / "freezer/a"), str(tmp_path / "freezer")),
    }
    facts = probe.cgroup_facts(places)
    assert facts["version"] == 1
    assert (facts["memory"]["max"], facts["memory"]["events"]["oom_kill"], facts["memory"]["stat"]["anon"]) == (
        1000000,
        3,
        10,
    )
    assert (facts["cpu"]["quota_cpus"], facts["cpu"]["nr_throttled"], facts["cpu"]["throttled_s"]) == (0.5, 6, 1.5)
    assert facts["frozen"] is True


def test_a_process_is_placed_by_its_cgroup_file() -> None:
    mounts = {"2": ("/sys/fs/cgroup", "/"), "memory": ("/cg/memory", "/")}
    places = probe.cgroup_places("4:memory:/slurm/job_7\n1:name=systemd:/x\n0::/user.slice\n", mounts)
    assert places == {
        "memory": ("/cg/memory/slurm/job_7", "/cg/memory"),
        "2": ("/sys/fs/cgroup/user.slice", "/sys/fs/cgroup"),
    }


def test_a_container_that_sees_its_own_cgroup_as_root_is_placed_at_the_mount() -> None:
    mounts = {"2": ("/sys/fs/cgroup", "/docker/abc")}
    assert probe.cgroup_places("0::/docker/abc\n", mounts)["2"] == ("/sys/fs/cgroup", "/sys/fs/cgroup")
    assert probe.cgroup_places("0::/../other\n", mounts)["2"] == ("/sys/fs/cgroup", "/sys/fs/cgroup")
