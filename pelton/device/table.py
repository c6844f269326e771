"""Devices by name: the part before ":" of what a user types."""

DEVICES = {
    "cpu": "pelton.device.cpu:CPUDevice",
    "cuda": "pelton.device.cuda:CUDADevice",
    "fake": "pelton.device.fake:FakeDevice",
}
