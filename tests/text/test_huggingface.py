"""Checkpoints that transformers wrote, tiny and random: greedy tokens are those of its own `generate`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mpi4dl._torchvision import import_torchvision
from mpi4dl.checkpoints.huggingface import Checkpoint
from mpi4dl.comm import Communicator, Refusal, world
from mpi4dl.datasets.text.tokenizer import BPETokenizer, PretrainedTokenizer
from mpi4dl.text.loading import find_trained, hold_text_model, open_batcher
from mpi4dl.text.options import Batching, Sampling
from mpi4dl.text.options import Ranks as Ranking
from tests.commands.test_generate import said
from tests.pool.ranks import Ranks

import_torchvision()
transformers = pytest.importorskip("transformers")

VOCABULARY, END, NEW = 300, 7, 12
ONE = Ranking()
PROMPTS = ((5, 17, 200), (9,) * 11 + (3,), (1, 2, 3, 4, 5, 6), (250, 60))
SIZES = {"vocab_size": VOCABULARY, "eos_token_id": END, "bos_token_id": 1}
GPT2 = {"n_positions": 40, "n_embd": 24, "n_layer": 2, "n_head": 4, **SIZES}
LLAMA = {
    "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 40, **SIZES,
}  # fmt: skip
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", GPT2),
    "gpt2, untied": ("GPT2", {**GPT2, "n_inner": 40, "tie_word_embeddings": False, "layer_norm_epsilon": 0.02}),
    "llama": ("Llama", {**LLAMA, "num_key_value_heads": 2, "head_dim": 10, "rms_norm_eps": 0.02}),
    "llama, tied": (
        "Llama",
        {**LLAMA, "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ),
}


def random_model(form: str, options: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{form}Config")(**options)
    model = getattr(transformers, f"{form}ForCausalLM" if form == "Llama" else f"{form}LMHeadModel")(config).eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1 and "bias" not in name), std=0.4)
    return model


def save(model: Any, folder: Path, **how: Any) -> None:
    model.save_pretrained(folder, **how)
    BPETokenizer.train(["if né: return 1\nelse: yield €\n"] * 9, 290).save(folder / "tokenizer.json")


def expected(model: Any, prompt: tuple[int, ...]) -> list[int]:
    found = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=NEW,
        do_sample=False,
        pad_token_id=0,
    )
    return list(found[0, len(prompt) :].tolist())


def heard(comm: Communicator, folder: Path, ranks: Ranking = ONE) -> list[list[int]]:
    """The greedy tokens after all prompts, in one batch."""
    batcher = open_batcher(comm, find_trained(comm, folder), ranks, Batching())
    found: list[list[int]] = [[] for _ in PROMPTS]
    if comm.rank:
        batcher.follow()
        return found
    for prompt, tokens in zip(PROMPTS, found, strict=True):
        sampling = Sampling(max_tokens=NEW, temperature=0)
        batcher.submit(prompt, sampling, lambda event, tokens=tokens: tokens.append(event.token))
    batcher.stop(drain=True)
    batcher.run()
    return found


@pytest.mark.parametrize("form", FORMS)
def test_greedy_tokens_are_those_of_transformers(tmp_path: Path, form: str) -> None:
    model = random_model(*FORMS[form])
    save(model, tmp_path)
    answers = [expected(model, prompt) for prompt in PROMPTS]
    assert len({tuple(answer) for answer in answers}) > 2
    assert heard(world(), tmp_path) == answers


@pytest.mark.parametrize("form", ["gpt2", "llama"])
def test_files_of_bfloat16_in_shards(tmp_path: Path, form: str) -> None:
    model = random_model(*FORMS[form]).bfloat16()
    save(model, tmp_path, max_shard_size="20KB")
    assert len(Checkpoint(tmp_path).files) > 1
    model.float()
    assert heard(world(), tmp_path) == [expected(model, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("form", "plan"), [("llama", Ranking(tensor=2)), ("gpt2", Ranking(stages=2)), ("llama", Ranking(stages=2))]
)
def test_over_ranks(ranks: Ranks, tmp_path: Path, form: str, plan: Ranking) -> None:
    model = random_model(*FORMS[form])
    save(model, tmp_path)
    found = ranks(2).run(heard, tmp_path, plan)[0]
    assert found == [expected(model, prompt) for prompt in PROMPTS]


def test_a_model_saved_without_its_head(tmp_path: Path) -> None:
    """As the files of the published GPT-2 are, whose names begin below `transformer`."""
    model = random_model(*FORMS["gpt2"])
    save(model, tmp_path)
    model.transformer.save_pretrained(tmp_path)
    assert heard(world(), tmp_path) == [expected(model, prompt) for prompt in PROMPTS]


def test_any_of_several_tokens_ends_a_text(tmp_path: Path) -> None:
    model = random_model(*FORMS["llama"])
    model.generation_config.eos_token_id = [END, expected(model, PROMPTS[0])[2]]
    save(model, tmp_path)
    answers = [expected(model, prompt) for prompt in PROMPTS]
    assert len(answers[0]) <= 3
    assert heard(world(), tmp_path) == answers


def test_a_model_whose_texts_no_token_ends(tmp_path: Path) -> None:
    model = random_model("GPT2", GPT2 | {"eos_token_id": None})
    save(model, tmp_path)
    assert heard(world(), tmp_path) == [expected(model, prompt) for prompt in PROMPTS]
    batcher = open_batcher(world(), find_trained(world(), tmp_path), ONE, Batching())
    with pytest.raises(ValueError, match="the prompt is empty"):
        batcher.submit((), Sampling(), lambda event: None)


@pytest.mark.parametrize("where", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_chat_template_is_noticed(tmp_path: Path, where: str) -> None:
    save(random_model(*FORMS["gpt2"]), tmp_path)
    assert not find_trained(world(), tmp_path).tokenizer.has_chats
    (tmp_path / where).write_text('{"chat_template": "{{ messages }}"}')
    assert find_trained(world(), tmp_path).tokenizer.has_chats


def test_logits_are_those_of_transformers(tmp_path: Path) -> None:
    model = random_model(*FORMS["llama"])
    save(model, tmp_path)
    held, remarks = hold_text_model(world(), find_trained(world(), tmp_path), Ranking())
    tokens = torch.randint(VOCABULARY, (2, 40))
    with torch.no_grad():
        torch.testing.assert_close(held.modules_of[0](tokens), model(tokens).logits, rtol=1e-4, atol=1e-4)
    assert remarks == []


def test_the_command_continues_text(tmp_path: Path) -> None:
    model = random_model(*FORMS["gpt2"])
    save(model, tmp_path)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    tokens = tokenizer("if né")["input_ids"]
    own = PretrainedTokenizer(tmp_path / "tokenizer.json", VOCABULARY, (END,))
    assert own.encode("if né").tolist() == tokens
    text = said(world(), str(tmp_path), "--prompt", "if né", "--temperature", "0", "--max-tokens", str(NEW))
    assert text == "if né" + own.decode(expected(model, tuple(tokens))) + "\n"


def test_a_space_at_the_beginning_is_kept() -> None:
    """Where the tokenizer's decoder leaves it out, as Llama's does: parts of a text make the text."""
    tokenizers = pytest.importorskip("tokenizers")
    from tempfile import TemporaryDirectory

    inner = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "▁": 1, "b": 2}, []))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    inner.decoder = tokenizers.decoders.Metaspace()
    with TemporaryDirectory() as folder:
        inner.save(f"{folder}/tokenizer.json")
        own = PretrainedTokenizer(Path(folder) / "tokenizer.json", 3, ())
    assert "".join(own.decode([token]) for token in (2, 1, 0)) == "b a"


@pytest.mark.parametrize(
    ("form", "other", "complaint"),
    [
        ("gpt2", {"model_type": "mamba"}, "model_type 'mamba' is not supported"),
        ("gpt2", {"activation_function": "relu"}, "activation_function 'relu' is not supported"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True is not supported"),
        ("gpt2", {"n_layer": "two"}, "n_layer is 'two', but must be"),
        ("gpt2", {"n_layer": 3}, "the weights have no such names: blocks.2"),
        ("gpt2", {"n_layer": 1}, "the model has no such names"),
        ("gpt2", {"n_positions": 50}, "shapes differ"),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_type 'yarn' is not supported"),
        ("llama", {"rope_parameters": None, "rope_scaling": {"type": "linear"}}, "type 'linear' is not supported"),
        ("llama", {"sliding_window": 8}, "sliding_window 8 is not supported"),
        ("llama", {"attention_bias": True}, "attention_bias True is not supported"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("llama", {"rope_parameters": {"rope_theta": "far"}}, "rope_theta 'far' is not supported"),
        ("llama", {"rope_parameters": "far"}, "rope_parameters 'far' is not supported"),
        ("llama", {"hidden_size": None}, "hidden_size is None, but must be"),
    ],
)
def test_what_is_refused(tmp_path: Path, form: str, other: dict[str, Any], complaint: str) -> None:
    save(random_model(*FORMS[form]), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | other))
    with pytest.raises(Refusal, match=complaint):
        hold_text_model(world(), find_trained(world(), tmp_path), Ranking())


def test_files_that_are_missing_or_damaged(tmp_path: Path) -> None:
    def complaint() -> str:
        with pytest.raises(Refusal) as caught:
            hold_text_model(world(), find_trained(world(), tmp_path), Ranking())
        return str(caught.value)

    save(random_model(*FORMS["gpt2"]), tmp_path, max_shard_size="20KB")
    shard = Checkpoint(tmp_path).files[0]
    shard.unlink()
    assert f"{shard} cannot be read" in complaint() or str(shard) in complaint()
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    assert "has no weight_map" in complaint()
    (tmp_path / "model.safetensors.index.json").unlink()
    assert "model.safetensors is missing: write it with AutoModelForCausalLM" in complaint()
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, "</s>"]}')
    assert "it must be a token, or a list of them" in complaint()
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "tokenizer.json").unlink()
    assert "AutoTokenizer.from_pretrained" in complaint()
    (tmp_path / "config.json").write_text("[]")
    assert "transformers did not write it" in complaint()
