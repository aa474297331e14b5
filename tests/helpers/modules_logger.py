"""A logger, as of a package, that writes which modules a training process has imported."""

from pathlib import Path

_CODE = """
import sys

class Modules:
    def __init__(self, folder, run_name):
        self.file = folder / "modules.txt"

    def log(self, metrics, step):
        pass

    def finish(self):
        self.file.write_text("\\n".join(sorted(sys.modules)))
"""


def install(folder: Path) -> None:
    """Makes `logger=[modules]` known where the folder is on the path."""
    (folder / "modules.py").write_text(_CODE)
    (metadata := folder / "modules-1.0.dist-info").mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: modules\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[nemo_rod.loggers]\nmodules = modules:Modules\n")


def imported(arm: Path) -> list[str]:
    """The modules of the training of an arm, from its folder."""
    return (arm / "modules.txt").read_text().split()
