"""The check of the installed releases, on made-up installations, and the lazy names."""

import subprocess
import sys
from pathlib import Path

import pytest

import torchrec_oper
from torchrec_oper.errors import VersionError
from torchrec_oper.versions import GO_TOGETHER, check_versions

ROOT = Path(torchrec_oper.__file__).resolve().parent.parent
GOOD = {"torch": "2.13.0+cpu", "torchrec": "1.8.0", "fbgemm-gpu-cpu": "1.8.0"}

# -S leaves site-packages out, so that the made-up distributions are the only ones; it
# also proves that the import needs the standard library alone.
IMPORT = "import sys; sys.path[:0] = sys.argv[1:]; import torchrec_oper; print('imported')"


def import_with(folder: Path, installed: dict[str, str]) -> subprocess.CompletedProcess[str]:
    for name, version in installed.items():
        metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
    return subprocess.run(
        [sys.executable, "-S", "-E", "-c", IMPORT, str(folder), str(ROOT)],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"torch": "2.13.0"},
        {"torch": "2.13.1+cu130"},
        {"torch": "2.13.0a0+git1234567"},
        {"torchrec": "1.8.2", "fbgemm-gpu-cpu": "1.8.0.post1"},
    ],
)
def test_releases_that_go_together_import(tmp_path, changes):
    result = import_with(tmp_path, {**GOOD, **changes})
    assert result.stdout == "imported\n", result.stderr


def test_the_cuda_build_of_fbgemm_goes_too(tmp_path):
    result = import_with(
        tmp_path, {"torch": "2.13.0+cu130", "torchrec": "1.8.0", "fbgemm-gpu": "1.8.0"}
    )
    assert result.stdout == "imported\n", result.stderr


@pytest.mark.parametrize(
    ("installed", "found", "commands"),
    [
        (
            {},
            ["torch    not installed", "torchrec not installed", "fbgemm   not installed"],
            [
                'install "torch==2.13.*" --index-url https://download.pytorch.org/whl/cpu',
                'install --no-deps "torchrec==1.8.*" "fbgemm-gpu-cpu==1.8.*"',
                "install tensordict torchmetrics==1.0.3 pyre-extensions tqdm",
            ],
        ),
        (
            {**GOOD, "torch": "2.12.1+cpu"},
            ["torch    2.12.1+cpu", "torchrec 1.8.0", "fbgemm   1.8.0 (fbgemm-gpu-cpu)"],
            ['install "torch==2.13.*" --index-url https://download.pytorch.org/whl/cpu'],
        ),
        (
            {**GOOD, "torch": "2.130.0+cpu"},
            ["torch    2.130.0+cpu", "torchrec 1.8.0", "fbgemm   1.8.0 (fbgemm-gpu-cpu)"],
            ['install "torch==2.13.*" --index-url https://download.pytorch.org/whl/cpu'],
        ),
        (
            {**GOOD, "torchrec": "1.7.0"},
            ["torch    2.13.0+cpu", "torchrec 1.7.0", "fbgemm   1.8.0 (fbgemm-gpu-cpu)"],
            ['install --no-deps "torchrec==1.8.*"'],
        ),
        (
            {**GOOD, "fbgemm-gpu-cpu": "1.10.0"},
            ["torch    2.13.0+cpu", "torchrec 1.8.0", "fbgemm   1.10.0 (fbgemm-gpu-cpu)"],
            ['install --no-deps "fbgemm-gpu-cpu==1.8.*"'],
        ),
        (
            {"torch": "2.13.0+cu130", "torchrec": "1.8.0"},
            ["torch    2.13.0+cu130", "torchrec 1.8.0", "fbgemm   not installed"],
            ['install --no-deps "fbgemm-gpu==1.8.*"'],
        ),
        (
            {"torch": "2.12.0", "torchrec": "1.8.0", "fbgemm-gpu": "1.8.0"},
            ["torch    2.12.0", "torchrec 1.8.0", "fbgemm   1.8.0 (fbgemm-gpu)"],
            ['install "torch==2.13.*"'],
        ),
        (
            {**GOOD, "fbgemm-gpu": "1.8.0"},
            [
                "torch    2.13.0+cpu",
                "torchrec 1.8.0",
                "fbgemm   1.8.0 (fbgemm-gpu) and 1.8.0 (fbgemm-gpu-cpu): they share a folder"
                " and have overwritten each other, keep one",
            ],
            [
                "uninstall --yes fbgemm-gpu fbgemm-gpu-cpu",
                'install --no-deps "fbgemm-gpu-cpu==1.8.*"',
            ],
        ),
    ],
    ids=[
        "nothing",
        "old torch",
        "2.130 isn't 2.13",
        "old torchrec",
        "1.10 isn't 1.1",
        "cuda without fbgemm",
        "cuda with old torch",
        "both fbgemm",
    ],
)
def test_a_mismatch_is_one_error_that_says_how_to_mend_it(tmp_path, installed, found, commands):
    result = import_with(tmp_path, installed)
    assert result.returncode == 1
    *_, message = result.stderr.partition("torchrec_oper.errors.VersionError: ")
    assert "During handling" not in result.stderr
    assert message.splitlines() == [
        "torchrec-oper needs releases of PyTorch, TorchRec and FBGEMM that go together.",
        "",
        "found:",
        *(f"  {line}" for line in found),
        "these go together:",
        "  torch 2.13 + torchrec 1.8 + fbgemm 1.8",
        "to mend it:",
        *(f"  python -m pip {command}" for command in commands),
        "(--no-deps because TorchRec's own metadata asks for the CUDA build of FBGEMM, whose"
        " files overwrite those of the CPU build)",
    ]


@pytest.mark.parametrize("remains", ["", "Name: torch\n"])
def test_what_an_uninstall_that_was_cut_short_leaves_counts_as_missing(tmp_path, remains):
    broken = tmp_path / "torch-2.13.0.dist-info"
    broken.mkdir()
    if remains:
        (broken / "METADATA").write_text(remains)
    result = import_with(tmp_path, {k: v for k, v in GOOD.items() if k != "torch"})
    assert "torch    not installed" in result.stderr


def test_the_commands_that_the_message_gives_lead_to_releases_that_go_together():
    for releases in GO_TOGETHER:
        check_versions(
            {
                "torch": f"{releases.torch}.0",
                "torchrec": f"{releases.torchrec}.0",
                "fbgemm-gpu": f"{releases.fbgemm}.0",
            }
        )


def test_the_error_is_an_import_error_too():
    with pytest.raises(ImportError) as caught:
        check_versions({})
    assert isinstance(caught.value, VersionError)


def test_every_public_name_loads_and_is_listed():
    for name in torchrec_oper.__all__:
        assert getattr(torchrec_oper, name) is not None, name
        assert name in dir(torchrec_oper)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'torchrec_oper' has no attribute 'Planner'"):
        torchrec_oper.Planner  # noqa: B018
