"""Builds and runs container images with buildah, over a base made from Debian's packages.

No engine, no registry and no cgroups are needed; root is.
"""

import ast
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from places import ROOT

PROGRAMS = ("buildah", "mmdebstrap", "unshare")
PACKAGES = "python3,python3-venv,ca-certificates"  # what docker.io/library/python has of Debian


class Builder:
    """Images in a folder of their own."""

    def __init__(self, root: Path, driver: str) -> None:
        self.root = root
        self._command = ["buildah", "--storage-driver", driver]
        self._command += ["--root", str(root / "storage"), "--runroot", str(root / "state")]
        self.pip_conf, self._mounts, self._own_indexes = pip_configuration(root)

    def __call__(self, *arguments: str) -> str:
        """Runs a command of buildah, and returns what it prints."""
        done = subprocess.run([*self._command, *arguments], capture_output=True, text=True)
        text = f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        assert done.returncode == 0, f"buildah {' '.join(arguments)}\n{text}"
        return done.stdout

    def bootstrap(self, tag: str) -> None:
        """A base image of Debian's Python."""
        archive = self.root / "base.tar"
        debian(archive, PACKAGES)
        container = self("from", "scratch").strip()
        self("add", "--quiet", container, str(archive), "/")
        self("commit", "--quiet", "--format", "docker", container, tag)
        self("rm", container)
        archive.unlink()

    def build(self, dockerfile: str, tag: str, base: str, *options: str) -> None:
        """An image of this checkout, from where this machine's pip takes its packages."""
        (image,) = json.loads(self("images", "--json", base))
        base = image["names"][0].rpartition(":")[0]
        own = ["--build-arg", f"BASE_IMAGE={base}", "--build-arg", f"BASE_DIGEST={image['digest']}"]
        own += ["--build-arg", "TORCH_INDEX_URL="] if self._own_indexes else []
        mounts = [word for path in self._mounts for word in ("--volume", f"{path}:{path}:ro")]
        self(
            *("build", "--isolation", "chroot", "--layers", "--format", "docker"),
            *("--file", str(ROOT / dockerfile), "--tag", tag),
            *("--secret", f"id=pip.conf,src={self.pip_conf}", *own, *mounts, *options, str(ROOT)),
        )

    def settings(self, tag: str) -> dict[str, Any]:
        """Entrypoint, Cmd, User, Volumes ... of an image."""
        manifest: dict[str, Any] = json.loads(self("inspect", "--type", "image", tag))
        return manifest["Docker"]["config"]

    def size(self, tag: str) -> str:
        """Size of an image, in words."""
        (image,) = json.loads(self("images", "--json", tag))
        return str(image["size"])

    def run(self, tag: str, *command: str, options: Sequence[str] = ()) -> str:
        """Runs a command in a fresh container of an image, as the image's user."""
        container = self("from", "--pull-never", tag).strip()
        try:
            # env looks for the command in the image's PATH; buildah itself does so in the host's
            words = ["run", "--isolation", "chroot", *options, container, "--", "env", *command]
            return self(*words)
        finally:
            self("rm", container)


def debian(target: Path, packages: str) -> None:
    """A small Debian with some packages, as an archive or in a folder."""
    # in a mount namespace of its own: killed, it leaves none of its mounts behind
    command = ["unshare", "--mount", "mmdebstrap", "--variant=minbase", f"--include={packages}"]
    command += ["--dpkgopt=force-unsafe-io", "bookworm", str(target)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def pip_configuration(folder: Path) -> tuple[Path, list[Path], bool]:
    """This machine's pip configuration as one file, what it names here, and if it has indexes."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    values: dict[str, str] = {}
    for line in lines:  # "global.cert='...'"; variables of the environment come first and win
        name, _, value = line.partition("=")
        values.setdefault(name.rpartition(".")[2], ast.literal_eval(value))
    file = folder / "pip.conf"
    file.write_text("[global]\n" + "".join(f"{key} = {v}\n" for key, v in values.items()))
    paths = []
    for word in " ".join(values.values()).split():
        if word.startswith("file://"):  # an index refers to files beside its own folder
            paths.append(Path(word.removeprefix("file://")).parent)
        elif word.startswith("/") and os.path.exists(word):
            paths.append(Path(word))
    return file, list(dict.fromkeys(paths)), any("index-url" in key for key in values)


@contextlib.contextmanager
def image_builder(root: Path) -> Iterator[Builder]:
    """A builder whose images are gone afterwards."""
    builder = Builder(root, _driver(root))
    try:
        yield builder
    finally:
        with contextlib.suppress(AssertionError):
            builder("rm", "--all")
        _clear(root)


def _driver(root: Path) -> str:
    """The storage driver that works here: overlay shares layers, vfs copies each of them."""
    probe = root / "probe"
    for driver in ("overlay", "vfs"):
        command = ["buildah", "--storage-driver", driver]
        command += ["--root", str(probe / "storage"), "--runroot", str(probe / "state")]
        made = subprocess.run([*command, "from", "scratch"], capture_output=True, text=True)
        mount = [*command, "mount", made.stdout.strip()]
        works = made.returncode == 0 and subprocess.run(mount, capture_output=True).returncode == 0
        if works:
            subprocess.run([*command, "rm", "--all"], capture_output=True)
        _clear(probe)
        if works:
            return driver
    raise AssertionError(f"buildah can store no image here: {made.stderr}")


def _clear(folder: Path) -> None:
    """Removes a folder with images, but never through a mount: what lies there is the machine's."""
    for mount in reversed(_mounts_below(folder)):
        subprocess.run(["umount", "--lazy", mount], capture_output=True)
    left = _mounts_below(folder)
    assert not left, f"{folder} is kept, because these are still mounted in it: {', '.join(left)}"
    shutil.rmtree(folder, ignore_errors=True)


def _mounts_below(folder: Path) -> list[str]:
    mounts = Path("/proc/self/mounts").read_text()
    return re.findall(rf"^\S+ ({re.escape(str(folder))}/\S+)", mounts, re.MULTILINE)
