"""What pyproject.toml cannot say: kernels for the CPU are compiled into the wheel, one library for
each level of this kind of machine, where there is a C compiler. An editable install compiles at
first use."""

from __future__ import annotations

import platform
import shutil
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent))

from pelton.device.native.build import prebuild
from pelton.device.native.cache import BuildError
from pelton.device.native.levels import LEVELS


class BuildWithKernels(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        folder = Path(self.build_lib, "pelton", "device", "native", "prebuilt")
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier build
        for level in LEVELS:
            if level.machine != platform.machine():
                continue
            try:
                prebuild(level, folder)
            except BuildError as error:
                self.warn(f"No kernels of level {level.name} in the wheel: {error}")


class PlatformWheel(bdist_wheel):
    """For this system only if something was compiled for it; for any Python 3 in any case."""

    def _has_kernels(self) -> bool:
        build_lib = Path(self.get_finalized_command("build_py").build_lib)
        return any(build_lib.rglob("prebuilt/*.so"))

    def run(self) -> None:
        self.run_command("build_py")
        if self._has_kernels():
            # What setuptools asks to find out where the package's files go.
            self.distribution.has_ext_modules = lambda: True
            self.root_is_pure = False
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        _, _, system = super().get_tag()
        return "py3", "none", system


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel})
