"""The check at import that the installed PyTorch, TorchRec and FBGEMM go together.

It reads the metadata that pip left behind and imports none of the three, so a wrong
pair is named here rather than by an undefined symbol deep in a native library.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError, version

from torchrec_oper.errors import VersionError

FBGEMM_CUDA, FBGEMM_CPU = "fbgemm-gpu", "fbgemm-gpu-cpu"
# What TorchRec's own metadata asks for besides FBGEMM.
TORCHREC_NEEDS = "tensordict torchmetrics==1.0.3 pyre-extensions tqdm"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


@dataclass(frozen=True)
class Releases:
    """Releases (``major.minor``) of the three packages that go together."""

    torch: str
    torchrec: str
    fbgemm: str

    def __str__(self) -> str:
        """The three as ``torch 2.13 + torchrec 1.8 + fbgemm 1.8``."""
        return " + ".join(f"{field.name} {getattr(self, field.name)}" for field in fields(self))


# Newest first: it is what the message asks for where nothing that is installed fits.
GO_TOGETHER = (Releases(torch="2.13", torchrec="1.8", fbgemm="1.8"),)

# Versions by distribution name; a distribution that isn't installed is left out.
Installed = Mapping[str, str]


def installed_versions() -> dict[str, str]:
    """The installed versions of PyTorch, TorchRec and both builds of FBGEMM."""
    found = {}
    for name in ("torch", "torchrec", FBGEMM_CUDA, FBGEMM_CPU):
        try:
            number: str | None = version(name)
        except (PackageNotFoundError, KeyError):
            continue
        # An uninstall that was cut short leaves metadata without a version.
        if number:
            found[name] = number
    return found


def check_versions(installed: Installed | None = None) -> None:
    """Raise unless the three packages are installed in releases that go together.

    Args:
        installed: versions by distribution name; read from the metadata if left out.

    Raises:
        VersionError: a package is missing or of another release, or both builds of
            FBGEMM are installed; the message says what was found and how to mend it.
    """
    if installed is None:
        installed = installed_versions()
    wanted = _closest(installed)
    wrong = _wrong(installed, wanted)
    if wrong:
        raise VersionError(_message(installed, wanted, wrong))


def _closest(installed: Installed) -> Releases:
    """The releases to ask for: those of the installed PyTorch, or else the newest."""
    for releases in GO_TOGETHER:
        if _release(installed.get("torch", "")) == releases.torch:
            return releases
    return GO_TOGETHER[0]


def _wrong(installed: Installed, wanted: Releases) -> list[str]:
    """Which of ``torch``, ``torchrec`` and ``fbgemm`` must be installed anew."""
    fbgemm = [installed[name] for name in (FBGEMM_CUDA, FBGEMM_CPU) if name in installed]
    found = {
        "torch": [installed[name] for name in ("torch",) if name in installed],
        "torchrec": [installed[name] for name in ("torchrec",) if name in installed],
        "fbgemm": fbgemm,
    }
    return [
        name
        for name, versions in found.items()
        if len(versions) != 1 or _release(versions[0]) != getattr(wanted, name)
    ]


def _release(number: str) -> str:
    """``major.minor`` of a version: ``2.13`` of ``2.13.0+cpu``; empty if there is none."""
    match = re.match(r"(\d+)\.(\d+)(?!\d)", number)
    return f"{int(match[1])}.{int(match[2])}" if match else ""


def _message(installed: Installed, wanted: Releases, wrong: list[str]) -> str:
    lines = ["torchrec-oper needs releases of PyTorch, TorchRec and FBGEMM that go together.", ""]
    lines += ["found:"]
    lines += [
        f"  {name:8} {installed.get(name, 'not installed')}" for name in ("torch", "torchrec")
    ]
    lines += [f"  {'fbgemm':8} {_fbgemm_found(installed)}"]
    lines += ["these go together:"]
    lines += [f"  {releases}" for releases in GO_TOGETHER]
    lines += ["to mend it:"]
    lines += [f"  {command}" for command in _commands(installed, wanted, wrong)]
    lines += [
        "(--no-deps because TorchRec's own metadata asks for the CUDA build of FBGEMM, whose"
        " files overwrite those of the CPU build)"
    ]
    return "\n".join(lines)


def _fbgemm_found(installed: Installed) -> str:
    builds = [name for name in (FBGEMM_CUDA, FBGEMM_CPU) if name in installed]
    if not builds:
        return "not installed"
    text = " and ".join(f"{installed[name]} ({name})" for name in builds)
    if len(builds) == 2:
        text += ": they share a folder and have overwritten each other, keep one"
    return text


def _commands(installed: Installed, wanted: Releases, wrong: list[str]) -> list[str]:
    """The pip commands that put right what is wrong, for the CPU or CUDA as installed."""
    pip = "python -m pip"
    cpu = _for_cpu(installed)
    commands = []
    if FBGEMM_CUDA in installed and FBGEMM_CPU in installed:
        commands.append(f"{pip} uninstall --yes {FBGEMM_CUDA} {FBGEMM_CPU}")
    if "torch" in wrong:
        index = f" --index-url {CPU_INDEX}" if cpu else ""
        commands.append(f'{pip} install "torch=={wanted.torch}.*"{index}')
    plain = [
        f'"{distribution}=={getattr(wanted, name)}.*"'
        for name, distribution in (
            ("torchrec", "torchrec"),
            ("fbgemm", FBGEMM_CPU if cpu else FBGEMM_CUDA),
        )
        if name in wrong
    ]
    if plain:
        commands.append(f"{pip} install --no-deps {' '.join(plain)}")
    if "torchrec" not in installed:
        commands.append(f"{pip} install {TORCHREC_NEEDS}")
    return commands


def _for_cpu(installed: Installed) -> bool:
    """Whether this looks like a machine without CUDA: PyTorch says so, or FBGEMM does."""
    build = installed.get("torch", "").partition("+")[2]
    if build:
        return build == "cpu"
    return FBGEMM_CUDA not in installed or FBGEMM_CPU in installed
