"""A model's files: config, tokenizer, processors, prompt template, and the identity under which its KV is stored."""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ctxwin.engines import vllm_support
from ctxwin.engines.encoding.families import Family, family_of, patches_per_token
from ctxwin.engines.encoding.templates import Template
from ctxwin.engines.torchvision_repair import repair
from ctxwin.errors import UnsupportedModel
from ctxwin.hashing import digest
from ctxwin.kv.config import Engine

_WHOLE = 1 << 30
"""Weight files up to this many bytes are hashed as a whole."""
_SAMPLE = 16 << 10
"""Of larger ones, this many bytes from the start of every tensor."""
_HUB_NAME = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*")
"""An owner and a repository, or a repository alone; what begins with a dot, a slash or a tilde is a path."""
_DTYPES = ("float32", "bfloat16", "float16")
_ORIGIN = ("transformers_version", "_name_or_path", "_commit_hash", "_from_model_config")


@dataclass(frozen=True)
class MediaTokens:
    """Token ids that stand for media, and around them.

    ``video`` is None where videos have no tokens of their own, ``start`` and ``end`` where pictures have no such marks,
    ``audio`` and its marks where the model does not hear.
    """

    start: int | None
    end: int | None
    image: int
    video: int | None
    audio: int | None = None
    audio_start: int | None = None
    audio_end: int | None = None


@dataclass(frozen=True)
class Checkpoint:
    """One model folder, opened without its weights.

    Attributes:
        name: what the caller asked for.
        path: the local folder.
        config: transformers config; an Omni model's thinker's.
        text_config: the decoder's part of it (the config itself for a text model).
        image_processor: None for a text model. ``video_processor``: None where there is none. ``processor``: of both.
        media: placeholder tokens; None for a text model.
        family: what the processors do; None for a text model.
        bos: ids that the tokenizer prepends by itself; used only without a chat template.
        eos: ids that end an answer.
        weights: digest of the weight files.
    """

    name: str
    path: Path
    config: Any
    text_config: Any
    tokenizer: Any
    image_processor: Any
    video_processor: Any
    media: MediaTokens | None
    template: Template
    bos: tuple[int, ...]
    eos: frozenset[int]
    weights: str
    processors: str = field(repr=False, default="")
    family: Family | None = None
    processor: Any = field(repr=False, default=None)

    @property
    def patches_per_token(self) -> int:
        """How many patches of a grid become one token; only for a vision model."""
        return patches_per_token(self.config, self.image_processor)

    def dtype(self, dtype_name: Any, default: str) -> str:
        """Name of the dtype to serve in: ``dtype_name`` (a name or torch's own), for None the checkpoint's, else ``default``.

        Raises ValueError for one in which nothing is served.
        """
        checkpoint_dtype = getattr(self.config, "dtype", None) or getattr(self.text_config, "dtype", None) or default
        name = str(checkpoint_dtype if dtype_name is None else dtype_name).removeprefix("torch.")
        if name not in _DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}, got {name!r}")
        return name

    def identity(self, dtype: str, positions: str) -> str:
        """Digest of everything that makes KV of this model interchangeable.

        Args:
            dtype: name of the dtype that KV is computed in.
            positions: name of the engine's position rule (``transformers``, ``vllm``): engines place what follows a
                video differently, so that a span of one must not be served by the other.
        """
        config = {k: v for k, v in _plain(self.config.to_dict()).items() if k != "dtype"}
        return digest("model", config, self.weights, dtype, self.processors, positions)


def read_config(source: str | Path) -> Any:
    """Return the transformers config of a folder or a Hub name; of a model that vLLM alone has, by vLLM's class.

    Code that a model brings along is not run. Raises UnsupportedModel for a model of vLLM's where there is no vLLM, ValueError
    for a broken config.
    """
    from transformers import AutoConfig, PreTrainedConfig

    try:
        kind = str(PreTrainedConfig.get_config_dict(source)[0].get("model_type"))
        if kind in vllm_support.VLLM_ONLY:
            vllm_support.register_config(kind)
        return AutoConfig.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError, UnsupportedModel):
        raise
    except Exception as error:  # a broken config leads transformers' classes to any
        fault = " ".join(str(error).split())
        raise ValueError(f"a model's config.json must be whole, got {fault} in {source}") from error


def open_checkpoint(name: str | Path, *, engine: Engine = "hf", remote_code: bool = False) -> Checkpoint:
    """Open a local folder or a Hugging Face Hub name (downloaded once, safetensors only).

    ``engine`` is the one that opens it; ``remote_code``: whether a processor or a tokenizer that the model brings along, and
    transformers does not know, may run.

    Cost: reading the weight files once for their digest (of files above 1 GiB samples, see `weights_digest`).

    Raises:
        ValueError: neither a model folder nor a name that the Hub knows.
        UnsupportedModel: positions under which KV cannot be moved (ALiBi ...), a vision model of no known family, no
            safetensors weights, a chat template that cannot be cut into pieces, a model that another engine alone has, or a
            folder with code of its own that may not run.
    """
    repair()
    path = local_folder(name, remote_code)
    from transformers import AutoTokenizer, GenerationConfig

    from ctxwin.kv.config import check_supported, text_backbone

    config = text_backbone(read_config(path))
    if engine == "hf" and config.model_type in vllm_support.VLLM_ONLY:
        raise UnsupportedModel(f"transformers has no model {config.model_type!r}; open it as vllm:{name}")
    check_supported(config)  # before gigabytes of weights are read
    text_config = config.get_text_config()
    family = family_of(config)
    weights = weights_digest(path)
    processor = image_processor = video_processor = media = None
    if family is not None:
        from transformers import AutoProcessor

        with _named_files("a processor", path):
            processor = _load(AutoProcessor, path, remote_code)
        tokenizer = processor.tokenizer
        whole = config.model_type == "deepseek_vl_v2"  # its processor has no parts
        image_processor = processor if whole else getattr(processor, "image_processor", None)
        video_processor = getattr(processor, "video_processor", None)
        source = getattr(processor, "chat_template", None) or tokenizer.chat_template
        media = _media_tokens(config, processor, family, family.video and video_processor is not None)
    else:
        with _named_files("a tokenizer", path):
            tokenizer = _load(AutoTokenizer, path, remote_code)
        source = tokenizer.chat_template
    # Transformers makes an empty one where there are no files.
    if not tokenizer("a", add_special_tokens=False)["input_ids"]:
        raise UnsupportedModel(_without("a tokenizer", path))
    _check_spelling(tokenizer)
    try:
        generation = GenerationConfig.from_pretrained(path)
    except OSError:
        generation = None
    picture = None
    if media is not None:
        start, image, end = (
            "" if i is None else str(tokenizer.convert_ids_to_tokens(i)) for i in (media.start, media.image, media.end)
        )
        # Gemma 3's template writes the token that opens a picture, its processor all the others.
        image_token = str(getattr(processor, "image_token", image)) if family is not None and family.marks else image
        # What Qianfan-OCR's template writes for a picture is plain text; its processor replaces it by all the tokens.
        picture = (start, str(getattr(processor, "image_placeholder_token", image_token)), end)
    parts = [image_processor, video_processor]
    if family is not None and family.sound:
        parts.append(getattr(processor, "feature_extractor", None))
    settings = [p.to_dict() if p is not None else None for p in parts]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = json.dumps(tokenizer.get_vocab(), sort_keys=True) if backend is None else backend.to_str()
    return Checkpoint(
        name=str(name),
        path=path,
        config=config,
        text_config=text_config,
        tokenizer=tokenizer,
        image_processor=image_processor,
        video_processor=video_processor,
        media=media,
        template=Template(_renderer(tokenizer, source), picture),
        bos=_bos(tokenizer),
        eos=_eos(generation, text_config, tokenizer),
        weights=weights,
        processors=digest("processors", _plain(settings), rules, source),
        family=family,
        processor=processor,
    )


def weights_digest(path: Path) -> str:
    """SHA-256 over the safetensors files of a folder, by name.

    Files up to 1 GiB are hashed whole (about a second each), larger ones by their header (names, dtypes, shapes, offsets),
    size, and the first 16 KiB of every tensor: enough to tell fine-tunes of one model apart without reading tens of
    gigabytes at every start. No modification times count, so a copy keeps its identity.

    Raises UnsupportedModel where there are none (pickled weights are not read).
    """
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise UnsupportedModel(f"the model must have *.safetensors weights, got none in {str(path)!r}; convert it")
    return digest("weights", [[f.name, f.stat().st_size, _file_digest(f)] for f in files])


def _file_digest(file: Path) -> str:
    with file.open("rb") as stream:
        if file.stat().st_size <= _WHOLE:
            return hashlib.file_digest(stream, "sha256").hexdigest()
        h = hashlib.sha256()
        raw = stream.read(8)
        length = int.from_bytes(raw, "little")
        header = stream.read(length)
        h.update(raw + header)
        for name, entry in sorted(json.loads(header).items()):
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                stream.seek(8 + length + begin)
                h.update(stream.read(min(_SAMPLE, end - begin)))
        return h.hexdigest()


def _check_spelling(tokenizer: Any) -> None:
    """Raise UnsupportedModel for a tokenizer that reads special tokens wherever a text spells them, as content might."""
    spelled, token_id = tokenizer.eos_token, tokenizer.eos_token_id
    if getattr(tokenizer, "backend_tokenizer", None) is not None or spelled is None:
        return  # `Tokens` sets a Rust backend's own option
    if token_id in tokenizer(str(spelled), add_special_tokens=False, split_special_tokens=True)["input_ids"]:
        raise UnsupportedModel(
            f"a tokenizer must be able to take {spelled!r} in a text as text, got {type(tokenizer).__name__}, with which any "
            "content could end a turn; put a tokenizer.json in the model's folder"
        )


def _load(kind: Any, path: Path, remote_code: bool) -> Any:
    try:
        return kind.from_pretrained(path, trust_remote_code=False)
    except ValueError as error:
        if "custom code" not in str(error):
            raise
        if not remote_code:
            raise ValueError("it is code in the folder; to trust it, open vllm: with trust_remote_code=True") from error
        return kind.from_pretrained(path, trust_remote_code=True)


@contextmanager
def _named_files(what: str, path: Path) -> Iterator[None]:
    """Say what a folder lacks, whatever transformers raises of it."""
    try:
        yield
    except (OSError, ValueError, TypeError, AttributeError, ImportError) as error:
        raise UnsupportedModel(f"{_without(what, path)} ({str(error).splitlines()[0][:300]})") from error


def _without(what: str, path: Path) -> str:
    return (
        f"a model folder must hold {what} (tokenizer.json, tokenizer_config.json and, where it sees, its processor's files), "
        f"got none in {str(path)!r} that reads text; copy the files of the model that it was trained from"
    )


def model_path(name: str | Path) -> Path | None:
    """The local path that ``name`` means; None for a name of the Hub's.

    Raises ValueError for what can only be a path and is not there: the Hub is not asked for it.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ValueError(f"a model must be a folder or a name of the Hub, got the file {str(name)!r}; name its folder")
    if isinstance(name, Path) or not _HUB_NAME.fullmatch(name):
        raise ValueError(f"a model must be a folder or a name of the Hub, got {str(name)!r}, and no folder is there")
    return None


def local_folder(name: str | Path, remote_code: bool = False, *, config_only: bool = False) -> Path:
    """A model's folder, downloaded where ``name`` is the Hub's, with its code on demand. Raises ValueError for neither."""
    path = model_path(name)
    if path is not None:
        if not (path / "config.json").is_file():
            raise ValueError(f"a model folder must hold a config.json, got {str(path)!r}")
        return path.resolve()
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "ctxwin-basis.st", *["*.py"] * remote_code]
    try:
        return Path(snapshot_download(str(name), allow_patterns=["config.json"] if config_only else patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"a model must be a local folder or a Hugging Face Hub name, got {str(name)!r}: {reason}; check its spelling"
        ) from error


def _media_tokens(config: Any, processor: Any, family: Family, video: bool) -> MediaTokens:
    vocabulary = processor.tokenizer.get_vocab()

    def find(tokens: str, *names: str) -> int:
        places = [getattr(source, name, None) for source in (config, processor) for name in names]
        places += map(vocabulary.get, tokens.split())
        token_id = next((place for place in places if place is not None), None)
        if token_id is None:
            raise UnsupportedModel(f"the config of a vision model must name {names[0]}, got none")
        return int(token_id)

    if family.marks:  # the processor's own name may be the token that opens a picture (Gemma 3)
        clip = find(str(processor.video_token), "video_token_id") if video else None
        return MediaTokens(None, None, find(str(processor.image_token), "image_token_id"), clip)
    sound = {}
    if family.sound:
        audio = {"audio": "audio_token", "audio_start": "audio_bos_token", "audio_end": "audio_eos_token"}
        sound = {field: vocabulary[getattr(processor, name)] for field, name in audio.items()}
    # Qwen's and Kimi K2.5's names, InternVL's, GLM's; Kimi-VL's config names the placeholder alone.
    starts = ("vision_start_token_id", "start_image_token_id", "image_start_token_id")
    return MediaTokens(
        **sound,
        start=find("<|media_start|> <|vision_start|>", *starts),
        end=find("<|media_end|> <|vision_end|>", "vision_end_token_id", "end_image_token_id", "image_end_token_id"),
        image=find("<|image_pad|>", "image_token_id", "media_placeholder_token_id"),
        video=find("<|video_pad|>", "video_token_id") if video else None,
    )


def _renderer(tokenizer: Any, source: str | None) -> Any:
    if not source:
        return None
    options = {"chat_template": source, "tokenize": False}

    def render(messages: list[dict[str, Any]], generation: bool, tools: list[dict[str, Any]] | None = None) -> str:
        return str(tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=generation, **options))

    return render


def _bos(tokenizer: Any) -> tuple[int, ...]:
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = tokenizer("a", add_special_tokens=True)["input_ids"]
    at = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), 0)
    return tuple(full[:at])


def _eos(generation: Any, text_config: Any, tokenizer: Any) -> frozenset[int]:
    ids: set[int] = set()
    for declared in (getattr(generation, "eos_token_id", None), getattr(text_config, "eos_token_id", None)):
        if declared is not None and not ids:
            ids |= {int(declared)} if isinstance(declared, int) else {int(i) for i in declared}
    if tokenizer.eos_token_id is not None:
        ids.add(int(tokenizer.eos_token_id))
    return frozenset(ids)


def _plain(value: Any) -> Any:
    """JSON form of a config, for `digest`; what JSON does not know becomes text."""
    return json.loads(json.dumps(value, sort_keys=True, default=str), object_hook=without_origin)


def without_origin(config: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON object of a config without the fields that say only which library wrote it, and where; an ``object_hook``."""
    fields = {name: value for name, value in config.items() if name not in _ORIGIN}
    if (dtype := fields.pop("torch_dtype", None)) is not None:  # the older name
        fields["dtype"] = fields.get("dtype") or dtype
    return fields
