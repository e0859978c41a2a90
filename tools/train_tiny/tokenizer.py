"""The byte-level BPE tokenizer of the bundled model, and the prompt pieces it was trained on.

Prompts are concatenations of separately tokenised pieces: a header that closes the system turn and opens the user turn,
chunks (an optional label line, then a picture), remembered exchanges, and a query.
"""

from __future__ import annotations

from typing import Any

from ctxwin.engines.torchvision_repair import repair
from ctxwin.tiny.sprites import COLORS, N_MARKS, SHAPES

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
HEADERS = (
    "You watch a camera.",
    "You are a helpful assistant.",
    "You are a careful observer.",
    "Answer briefly.",
    "Look at the pictures and answer with one word.",
    "You guard a warehouse. Report what you see, and nothing else.",
    "You are a robot that remembers what it saw.",
    "Frames arrive one after another. A question follows at the end.",
    "You assist an operator who reviews old recordings; be exact, be short, and say only what the pictures show.",
    "Watch.",
)
_WORDS = (
    "you the a are is in of and to for with on at it an agent assistant camera robot home user picture frame video "
    "answer question short word exact look watch see tell report say what who when only never always please room "
    "door street screen page image be this that each one then new old first last helpful careful system operator do "
    "not use your my we they"
)
HEADER_WORDS = _WORDS.split()
LABELS = ("t={s} s\n", "t={s}.0 s\n", "frame {s}\n", "camera 2, t={s} s\n", "12:03:{s:02d}\n", "note: all quiet\n")

_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type in ('image', 'image_url') %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def transformers() -> Any:
    """The transformers module, made importable where torchvision does not match torch; imported on first use."""
    repair()
    import transformers

    return transformers


def header_text(header: str) -> str:
    """The opening piece: the system turn, closed, and the user turn, opened."""
    return f"<|im_start|>system\n{header}<|im_end|>\n<|im_start|>user\n"


def query_text(question: str) -> str:
    """The closing piece: the question ends the user turn and the assistant's turn opens."""
    return f"{question}<|im_end|>\n<|im_start|>assistant\n"


def exchange_text(question: str, answer: str) -> str:
    """A remembered exchange between two chunks; leaves the user turn open."""
    return f"{query_text(question)}{answer}<|im_end|>\n<|im_start|>user\n"


def build_tokenizer() -> Any:
    """Train the tokenizer (deterministic, under a second); returns a transformers fast tokenizer.

    Colours and shapes (bare) and numbers (" 17") are single tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    words = [*COLORS, *SHAPES, "color", "shape", "of", *HEADER_WORDS]
    numbers = [f"{k:02d}" for k in range(N_MARKS)]
    labels = [label.format(s=12) for label in LABELS]
    roles = ["system", "user", "assistant", "\n"]
    corpus = [*words, *numbers, *(f" {w}" for w in (*words, *numbers)), *HEADERS, *labels, *roles]
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        min_frequency=1,
        show_progress=False,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return transformers().PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(SPECIAL_TOKENS),
        chat_template=_TEMPLATE,
    )
