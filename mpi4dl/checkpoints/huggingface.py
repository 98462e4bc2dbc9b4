"""Checkpoints that Hugging Face's transformers wrote, of the forms GPT-2 and Llama, as values of our GPT.

config.json                     the form and its sizes
model.safetensors               the weights, or model.safetensors.index.json and the files that it names
generation_config.json          the tokens that end a text, if config.json does not have them
chat_template.jinja             the form of chats, or tokenizer_config.json has it
"""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from mpi4dl._files import read_regular
from mpi4dl.checkpoints.json_values import parse

CONFIG, GENERATION, INDEX = "config.json", "generation_config.json", "model.safetensors.index.json"
CHATS, OF_TOKENIZER = "chat_template.jinja", "tokenizer_config.json"
WHOLE = "model.safetensors"
THIRDS = ("query", "key", "value")  # of GPT-2's c_attn
BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")  # of older files
REQUIRED = object()

# Options of our GPT, by the names that config.json has for them, with the defaults of transformers.
SIZES: Mapping[str, Mapping[str, tuple[str, Any]]] = {
    "gpt2": {
        "vocabulary": ("vocab_size", 50257), "context": ("n_positions", 1024), "num_layers": ("n_layer", 12),
        "num_heads": ("n_head", 12), "hidden": ("n_embd", 768), "ff_dim": ("n_inner", None),
        "norm_eps": ("layer_norm_epsilon", 1e-5), "tied": ("tie_word_embeddings", True),
    },
    "llama": {
        "vocabulary": ("vocab_size", REQUIRED), "context": ("max_position_embeddings", 2048),
        "num_layers": ("num_hidden_layers", REQUIRED), "num_heads": ("num_attention_heads", REQUIRED),
        "num_kv_heads": ("num_key_value_heads", None), "head_dim": ("head_dim", None),
        "hidden": ("hidden_size", REQUIRED), "ff_dim": ("intermediate_size", REQUIRED),
        "norm_eps": ("rms_norm_eps", 1e-6), "tied": ("tie_word_embeddings", False),
    },
}  # fmt: skip
ALWAYS: Mapping[str, Mapping[str, Any]] = {
    "gpt2": {},
    "llama": {"positions": "rotary", "activation": "swiglu", "norm": "rms", "bias": False},
}
# The values that our GPT computes with, of which the first is the default of transformers.
SUPPORTED: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "gpt2": {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"), "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,), "quantization_config": (None,),
    },
    "llama": {
        "hidden_act": ("silu", "swish"), "attention_bias": (False,), "mlp_bias": (False,), "sliding_window": (None,),
        "quantization_config": (None,),
    },
}  # fmt: skip
ROPE = {"rope_type": ("default",), "type": ("default",), "partial_rotary_factor": (1.0,)}
# Modules of our GPT, and theirs, below `transformer.` or `model.`; * is the number of a block.
MODULES: Mapping[str, Mapping[str, str]] = {
    "gpt2": {
        "embedding.tokens": "wte", "embedding.positions": "wpe", "norm": "ln_f", "lm_head": "lm_head",
        "blocks.*.norm1": "h.*.ln_1", "blocks.*.norm2": "h.*.ln_2",
        **{f"blocks.*.attention.{part}": "h.*.attn.c_attn" for part in THIRDS},
        "blocks.*.attention.output": "h.*.attn.c_proj",
        "blocks.*.feed_forward.up": "h.*.mlp.c_fc", "blocks.*.feed_forward.output": "h.*.mlp.c_proj",
    },
    "llama": {
        "embedding.tokens": "embed_tokens", "norm": "norm", "lm_head": "lm_head",
        "blocks.*.norm1": "layers.*.input_layernorm", "blocks.*.norm2": "layers.*.post_attention_layernorm",
        **{f"blocks.*.attention.{part}": f"layers.*.self_attn.{part[0]}_proj" for part in THIRDS},
        "blocks.*.attention.output": "layers.*.self_attn.o_proj",
        **{f"blocks.*.feed_forward.{part}": f"layers.*.mlp.{part}_proj" for part in ("up", "gate")},
        "blocks.*.feed_forward.output": "layers.*.mlp.down_proj",
    },
}  # fmt: skip


class Theirs(NamedTuple):
    """Where a value of our GPT is: in their value `name`, `turned` if that is a Conv1D's, or in a `third` of it."""

    name: str
    turned: bool = False
    third: int | None = None

    def of(self, value: Tensor) -> Tensor:
        value = value.T if self.turned else value
        return value if self.third is None else value.chunk(3)[self.third]


def is_checkpoint(folder: Path) -> bool:
    """Whether transformers may have written this folder: it has a config.json, and is no run of ours."""
    return (folder / CONFIG).is_file() and not (folder / "config.toml").exists()


def _read(path: Path) -> dict[str, Any]:
    found = parse(read_regular(path), str(path))
    if not isinstance(found, dict):
        raise ValueError(f"{path} has no object of JSON, so transformers did not write it")
    return found


class Checkpoint:
    """A folder that transformers wrote: `options` of our GPT, and `ends`, the tokens that end a text.

    `has_chats`: whether it was trained on chats in a form of its own.

    Raises:
        ValueError: in one sentence: it is of another form, or our GPT has no such option.
        OSError: a file cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, path = folder, folder / CONFIG
        config = _read(path)
        self.form = str(config.get("model_type"))
        if self.form not in SIZES:
            raise ValueError(
                f"{path}: model_type {self.form!r} is not supported: of Hugging Face's models, text is generated by "
                f"those of the types {' and '.join(SIZES)}"
            )
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        _require(path, config, SUPPORTED[self.form])
        if not isinstance(rope, dict):
            raise ValueError(f"{path}: rope_parameters {rope!r} is not supported: it must be an object of JSON")
        _require(path, rope, ROPE)
        self.options: dict[str, Any] = {"dropout": 0.0, **ALWAYS[self.form]}
        for option, (name, default) in SIZES[self.form].items():
            value = config.get(name, default)
            kind = {"tied": bool, "norm_eps": float}.get(option, int)
            if value is None and default is None:
                continue
            if not isinstance(value, kind) or value < 0:
                known = "is missing" if value is REQUIRED else f"is {value!r}"
                raise ValueError(f"{path}: {name} {known}, but must be of the type {kind.__name__}, and not negative")
            self.options[option] = value
        if self.form == "llama":
            theta = rope.get("rope_theta") or config.get("rope_theta") or 10_000.0
            if not isinstance(theta, int | float) or theta <= 0:
                raise ValueError(f"{path}: rope_theta {theta!r} is not supported: it must be a positive number")
            self.options["rotary_base"] = float(theta)
        self.ends = self._ends(config)
        tokenizer = folder / OF_TOKENIZER
        described = _read(tokenizer) if tokenizer.is_file() else {}
        self.has_chats = (folder / CHATS).exists() or bool(described.get("chat_template"))

    def _ends(self, config: dict[str, Any]) -> tuple[int, ...]:
        path = self.folder / GENERATION
        ends = (_read(path) if path.is_file() else {}).get("eos_token_id", config.get("eos_token_id"))
        found = ends if isinstance(ends, list) else [] if ends is None else [ends]
        if not all(type(each) is int and each >= 0 for each in found):
            raise ValueError(
                f"{self.folder}: eos_token_id {ends!r} is not supported: it must be a token, or a list of them"
            )
        return tuple(found)

    @property
    def files(self) -> list[Path]:
        """The files of weights. Raises ValueError, OSError."""
        path, whole = self.folder / INDEX, self.folder / WHOLE
        if not path.is_file():
            if not whole.exists():
                raise ValueError(
                    f"{whole} is missing: write it with AutoModelForCausalLM.from_pretrained(FOLDER)"
                    ".save_pretrained(FOLDER) of transformers"
                )
            return [whole]
        names = _read(path).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
            raise ValueError(f"{path} has no weight_map, so transformers did not write it")
        return [self.folder / Path(name).name for name in sorted(set(names.values()))]

    def places(self, stored: Collection[str]) -> dict[str, Theirs]:
        """Where each value of our GPT is among theirs. Values that it has no place for keep their names."""
        found = {ours: place for ours, place in self._candidates() if place.name in stored}
        used = {place.name for place in found.values()}
        rest = [name for name in stored if name not in used and not name.endswith(BUFFERS)]
        return found | {name: Theirs(name) for name in rest if not (self.options["tied"] and name == "lm_head.weight")}

    def _candidates(self) -> Iterator[tuple[str, Theirs]]:
        for ours, theirs in MODULES[self.form].items():
            if ours == "lm_head" and self.options["tied"]:
                continue
            fused = theirs.endswith("c_attn")
            third = THIRDS.index(ours.rpartition(".")[2]) if fused else None
            numbers = map(str, range(self.options["num_layers"])) if "*" in ours else [""]
            for number in numbers:
                for leaf in ("weight", "bias"):
                    turned = fused or theirs.endswith(("c_proj", "c_fc"))
                    for prefix in ("", "transformer.", "model."):  # none where the part below the head was saved
                        name = f"{prefix}{theirs}.{leaf}".replace("*", number)
                        yield (
                            f"{ours}.{leaf}".replace("*", number),
                            Theirs(name, turned and leaf == "weight", third),
                        )


def _require(path: Path, config: Mapping[str, Any], supported: Mapping[str, tuple[Any, ...]]) -> None:
    for name, values in supported.items():
        if config.get(name, values[0]) not in values:
            raise ValueError(
                f"{path}: {name} {config[name]!r} is not supported: it must be {' or '.join(map(repr, values))}"
            )
