"""Write checkpoints atomically, and verify them before use.

A checkpoint is a folder `checkpoints/step_000040/`:

    model/          the policy in Hugging Face's format, for evaluation, export and chat
    trainer.pt      optimizer states and critic, for a resumed run
    manifest.json   step, configuration fingerprint, SHA-256 of every file

It is written under another name and renamed when complete, so kill -9 leaves the old state or the
new one. A folder without a matching manifest is refused instead of used. `trainer.pt` is read with
`weights_only=True`: never code.
"""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from agent_r1.ground import bounds
from agent_r1.ground.errors import AgentR1Error
from agent_r1.ground.files import RESUME, remove, sha256, whole, writing

if TYPE_CHECKING:
    import torch

CHECKPOINT_FORMAT = 1
_NAME = re.compile(r"step_(\d{6})")


def checkpoint_step(folder: Path) -> int:
    """Return the step of a checkpoint's folder, which is called `step_000010`."""
    return int(folder.name.removeprefix("step_"))


def save_checkpoint(
    folder: Path,
    step: int,
    write_model: Callable[[Path], None],
    state: dict[str, Any],
    fingerprint: str,
    keep: int,
    spare: int | None = None,
) -> Path:
    """Write `folder/step_NNNNNN`, and delete all but the newest `keep` and that of step `spare`.
    `write_model` fills the model folder."""
    final = folder / f"step_{step:06d}"
    for stale in folder.glob(".part-*"):  # left by a kill during an earlier save
        remove(stale)
    with writing(f"the checkpoint {final}", RESUME):
        folder.mkdir(parents=True, exist_ok=True)
        with whole(final) as part:
            part.mkdir()
            write_model(part / "model")
            _write_state(state, part / "trainer.pt")
            paths = sorted(f for f in part.rglob("*") if f.is_file())
            with (
                ThreadPoolExecutor() as pool
            ):  # with verl these are 25 GB and more, while GPUs wait
                files = dict(
                    zip(
                        (str(f.relative_to(part)) for f in paths),
                        pool.map(sha256, paths),
                        strict=True,
                    )
                )
            manifest = {
                "format": CHECKPOINT_FORMAT,
                "step": step,
                "config": fingerprint,
                "files": files,
            }
            (part / "manifest.json").write_text(json.dumps(manifest, indent=1))
    others = [c for c in list_checkpoints(folder) if checkpoint_step(c) != spare]
    for old in others[:-keep]:
        remove(old)
    return final


def refuse_weights(weights: Iterable[torch.Tensor], who: str) -> None:
    """Raise AgentR1Error for NaN or infinity, which must not replace an older, good checkpoint."""
    if not all(bool(tensor.isfinite().all()) for tensor in weights):
        raise AgentR1Error(
            f"{who} has weights that are not finite and is not saved; the earlier checkpoints are "
            "good. Start a new run (--run NAME) with a smaller learning rate",
            code="broken_weights",
        )


def list_checkpoints(folder: Path) -> list[Path]:
    """List checkpoint folders, oldest first. Incomplete ones have other names."""
    return (
        sorted(p for p in folder.glob("step_*") if _NAME.fullmatch(p.name))
        if folder.is_dir()
        else []
    )


def read_checkpoint(path: Path, *fingerprints: str) -> tuple[int, dict[str, Any]]:
    """Verify every file's hash, and return the step and trainer state of a checkpoint.

    Raises AgentR1Error for a missing, damaged or foreign checkpoint, and for one of a configuration
    with none of these fingerprints.
    """
    import torch

    manifest = verify_checkpoint(path)
    if manifest["config"] not in fingerprints:
        raise AgentR1Error(
            f"{path} was made with another configuration, or by another version; resume with the "
            "settings in the run's config.yaml, or start a new run with --run NAME",
            code="other_settings",
        )
    return manifest["step"], torch.load(path / "trainer.pt", map_location="cpu", weights_only=True)


def check_file_names(path: Path, files: Iterable[str]) -> None:
    """Raise AgentR1Error for a manifest that names anything but regular files in its folder.

    A run may be a stranger's: `/dev/zero` would be hashed for ever.
    """
    for name in files:
        file = path / name
        steps = PurePosixPath(name).parts
        outside = PurePosixPath(name).is_absolute() or ".." in steps or "\\" in name
        if outside or file.is_symlink() or (file.exists() and not file.is_file()):
            raise AgentR1Error(
                f"{path}/manifest.json names {name!r}, which is not a file of this checkpoint",
                code="damaged_checkpoint",
            )


PREVIOUS = "delete it and resume from the previous one, or start again without --resume"


def verify_checkpoint(path: Path, remedy: str = PREVIOUS) -> dict[str, Any]:
    """Return the manifest, if all its files are complete.

    Raise AgentR1Error with `remedy` otherwise.
    """
    try:
        manifest = bounds.read_json(path / "manifest.json")
        files = manifest["files"]
        version = manifest["format"]
        if version != CHECKPOINT_FORMAT or not {"step", "config"} <= manifest.keys():
            raise AgentR1Error(
                f"{path} has checkpoint format {version!r}; this version reads {CHECKPOINT_FORMAT}",
                code="other_format",
            )
        check_file_names(path, files)
        damaged_files = [name for name, digest in files.items() if sha256(path / name) != digest]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise AgentR1Error(
            f"{path} is not a complete checkpoint ({type(error).__name__}: {error}); {remedy}",
            code="damaged_checkpoint",
        ) from None
    if damaged_files:
        raise AgentR1Error(
            f"{path} is damaged: {damaged_files[0]} does not match its checksum; {remedy}",
            code="damaged_checkpoint",
        )
    return manifest


def _write_state(state: dict[str, Any], path: Path) -> None:
    import torch

    try:
        torch.save(state, path)
    except RuntimeError as error:  # torch raises it for a full disk
        raise OSError(errno.EIO, f"{path.name}: {str(error).splitlines()[0]}") from None
