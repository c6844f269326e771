"""Names that users type: of devices, the part before ":", and of ways to stage memory."""

# Best first: see device/staging.py.
STAGING_MODES = ("aliased", "pinned", "pageable")

DEVICES = {
    "cpu": "pelton.device.cpu:CPUDevice",
    "cuda": "pelton.device.cuda:CUDADevice",
    "fake": "pelton.device.fake:FakeDevice",
}
