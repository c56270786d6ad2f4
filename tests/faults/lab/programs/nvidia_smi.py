# A recorded answer of nvidia-smi: one H200 and who holds memory on it.
import sys
import time

RECORDED = {}
GPU = {
    "index": "0", "uuid": "GPU-5f0c7f1e-2b7a-4f43-9a0e-3d1f6f0c8a11", "name": "NVIDIA H200", "pci.bus_id": "00000000:0F:00.0", "driver_version": "570.86.15",
    "utilization.gpu": "0", "utilization.memory": "0", "memory.used": "16785", "memory.total": "143771", "power.draw": "118.42", "enforced.power.limit": "700.00",
    "power.limit": "700.00", "clocks.sm": "1980", "clocks.max.sm": "1980", "clocks.mem": "3201", "clocks.max.mem": "3201", "temperature.gpu": "34",
    "pstate": "P0", "clocks_throttle_reasons.active": "0x0000000000000000", "clocks_event_reasons.active": "0x0000000000000000", "pcie.link.gen.current": "5",
    "pcie.link.gen.max": "5", "pcie.link.width.current": "16", "pcie.link.width.max": "16", "ecc.errors.uncorrected.volatile.total": "0",
    "mig.mode.current": "Disabled",
}  # fmt: skip
UNITS = {"utilization": "%", "memory": "MiB", "power": "W", "clocks": "MHz"}


def main():
    query = next((a for a in sys.argv[1:] if a.startswith("--query-")), "")
    if RECORDED.get("hang"):
        time.sleep(3600)
    if RECORDED.get("broken"):
        print(RECORDED["broken"])
        sys.exit(15)
    if query.startswith("--query-compute-apps="):
        for pid, mib in RECORDED.get("apps", {}).items():
            print("%s, %s, %s, python" % (GPU["uuid"], pid, mib))
        return
    GPU.update({k.replace("__", "."): str(v) for k, v in RECORDED.get("readings", {}).items()})
    names = query.partition("=")[2].split(",")
    for name in names:
        if name not in GPU:
            print('Field "%s" is not a valid field to query.' % name)
            sys.exit(2)
    print(
        ", ".join(
            n + (" [%s]" % UNITS[n.split(".")[0]] if n.split(".")[0] in UNITS and "reasons" not in n else "")
            for n in names
        )
    )
    print(", ".join(GPU[n] for n in names))


main()
