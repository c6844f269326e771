import pytest

from pelton.device import memory
from pelton.device.memory import cpu_facts, cpu_memory, physical_cores

GIB = 2**30


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A /proc and /sys of our own: 16 GiB, 10 of them free, 4 cores of 2 threads each."""
    monkeypatch.setattr(memory, "_allowed_cpus", lambda: set(range(8)))

    def write(files):
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return tmp_path

    write({"proc/meminfo": f"MemTotal: {16 * 2**20} kB\nMemAvailable: {10 * 2**20} kB\n"})
    for cpu in range(8):
        siblings = f"{cpu % 4},{cpu % 4 + 4}\n"
        write({f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": siblings})
    return write


def test_without_limits(tree):
    assert cpu_memory(tree({})) == (16 * GIB, 10 * GIB)


def test_cgroup_v2_and_its_parents(tree):
    root = tree(
        {
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/memory.max": f"{6 * GIB}\n",
            "sys/fs/cgroup/a/memory.current": f"{5 * GIB}\n",
            "sys/fs/cgroup/a/memory.stat": f"anon 1\ninactive_file {GIB}\nactive_file {GIB}\n",
            "sys/fs/cgroup/a/b/memory.max": "max\n",
            "sys/fs/cgroup/a/b/memory.current": f"{5 * GIB}\n",
        }
    )
    # 5 GiB are used, but 2 of them are file cache, which can be given up.
    assert cpu_memory(root) == (6 * GIB, 3 * GIB)
    tree({"sys/fs/cgroup/a/b/memory.max": f"{4 * GIB}\n"})
    assert cpu_memory(root) == (4 * GIB, 0)


def test_cgroup_v1(tree):
    root = tree(
        {
            "proc/self/cgroup": "4:memory:/job\n1:cpu,cpuacct:/job\n0::/\n",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{8 * GIB}\n",
            "sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{3 * GIB}\n",
            "sys/fs/cgroup/memory/job/memory.stat": f"total_inactive_file {GIB}\n",
        }
    )
    assert cpu_memory(root) == (8 * GIB, 6 * GIB)


def test_a_path_that_the_container_does_not_show(tree):
    root = tree(
        {
            "proc/self/cgroup": "0::/../docker/xyz\n",
            "sys/fs/cgroup/memory.max": f"{2 * GIB}\n",
            "sys/fs/cgroup/memory.current": "0\n",
        }
    )
    assert cpu_memory(root) == (2 * GIB, 2 * GIB)


def test_cores_count_once_and_quotas_are_respected(tree, monkeypatch):
    root = tree({})
    assert physical_cores(root) == 4
    monkeypatch.setattr(memory, "_allowed_cpus", lambda: {0, 1, 5})
    assert physical_cores(root) == 2
    monkeypatch.setattr(memory, "_allowed_cpus", lambda: set(range(8)))
    tree({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"})
    assert physical_cores(root) == 2
    tree({"sys/fs/cgroup/cpu.max": "max 100000\n"})
    assert physical_cores(root) == 4
    tree(
        {
            "proc/self/cgroup": "1:cpu:/\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        }
    )
    assert physical_cores(root) == 1


@pytest.mark.parametrize(
    ("flags", "bf16", "fp16"),
    [("avx2", False, False), ("avx512_bf16", True, False), ("amx_bf16 avx512_fp16", True, True)],
)
def test_fast_types_come_from_the_flags(tree, flags, bf16, fp16):
    root = tree({"proc/cpuinfo": f"model name\t: A chip\nflags\t\t: fpu {flags}\n"})
    facts = cpu_facts(root)
    assert (facts.kind, facts.name) == ("cpu", "A chip")
    assert (facts.fast_bf16, facts.fast_fp16) == (bf16, fp16)


def test_on_this_machine():
    facts = cpu_facts()
    assert 0 < facts.free_bytes <= facts.total_bytes
    assert facts.num_cores >= 1
