"""Small Hugging Face folders as models are published: five tokenizers, with the files that stand beside each."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXT = "the cat sat on the mat. a dog ran in the park, and rain fell on the old roof; 12 or 345 birds flew by. "
SIZES = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 64}


def folder(name: str, at: Path) -> Path:
    """Write the folder of that name (a key of FOLDERS) below `at`, with weights that are drawn; returns its path."""
    path = at / name
    torch.manual_seed(sorted(FOLDERS).index(name))
    for each in FOLDERS[name](path):
        if isinstance(each, torch.nn.Module):
            ends = each.config.eos_token_id
            with torch.no_grad():  # so that some texts end
                each.get_output_embeddings().weight[ends] *= 2.5
        each.save_pretrained(path)
    return path


def _byte_level(specials: list[str], vocab_size: int = 300) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    quiet = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=specials, **quiet)
    tokenizer.train_from_iterator([TEXT * 20], trainer)
    return tokenizer


def _saved(path: Path, tokenizer: Tokenizer, about: Mapping[str, Any], more: Mapping[str, Any] | None = None) -> None:
    """The tokenizer; about: its tokenizer_config.json. more: name and content of further files."""
    path.mkdir(parents=True)
    tokenizer.save(str(path / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", **about}
    for name, value in {"tokenizer_config.json": about, **(more or {})}.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(value if isinstance(value, str) else json.dumps(value, indent=2))


def _llama(path: Path) -> Iterator[Any]:
    """BOS by the post-processor, two ids that stop, a chat template, as Llama 3.1 Instruct."""
    tokenizer = _byte_level(["<|begin|>", "<|end|>", "<|turn|>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 0)])
    templates = {"chat_template.jinja": "{{ messages }}", "additional_chat_templates/rag.jinja": "{{ documents }}"}
    _saved(path, tokenizer, {"bos_token": "<|begin|>", "eos_token": "<|end|>"}, templates)
    kinds = {"bos_token_id": 0, "eos_token_id": [1, 2]}
    sizes = {**SIZES, "intermediate_size": 64, "num_key_value_heads": 2, "vocab_size": 300, "initializer_range": 0.3}
    config = transformers.LlamaConfig(**sizes, **kinds)
    yield transformers.LlamaForCausalLM(config)
    yield transformers.GenerationConfig(**kinds, temperature=0.6, do_sample=True)


def _gpt2(path: Path) -> Iterator[Any]:
    """One special token, which begins and ends; named in special_tokens_map.json alone, as in files of 2020."""
    tokenizer = _byte_level(["<|endoftext|>"])
    named = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
    _saved(path, tokenizer, {"model_max_length": 64}, {"special_tokens_map.json": named})
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 64, "vocab_size": 300}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, initializer_range=0.3)
    yield transformers.GPT2LMHeadModel(config)


def _qwen3(path: Path) -> Iterator[Any]:
    """No BOS, tokens that tokenizer_config.json adds to those of tokenizer.json, eos of a turn, as Qwen3."""
    added = {"300": {"content": "<|im_start|>", "special": True}, "301": {"content": "<|im_end|>", "special": True}}
    about = {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    about |= {"add_bos_token": False, "added_tokens_decoder": added}
    _saved(path, _byte_level(["<|endoftext|>"]), about)
    kinds = {"eos_token_id": [301, 0], "pad_token_id": 0}
    sizes = {**SIZES, "intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 304}
    yield transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, **kinds, initializer_range=0.3))
    yield transformers.GenerationConfig(**kinds)


def _neox(path: Path) -> Iterator[Any]:
    """A table larger than the vocabulary, a BOS token that nothing puts before a text."""
    about = {"bos_token": "<s>", "eos_token": {"content": "</s>", "__type": "AddedToken"}}
    _saved(path, _byte_level(["<s>", "</s>"], 290), about)
    sizes = {**SIZES, "intermediate_size": 128, "vocab_size": 320, "bos_token_id": 0, "eos_token_id": 1}
    yield transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**sizes, initializer_range=0.3))


def _sentencepiece(path: Path) -> Iterator[Any]:
    """BPE over characters with bytes for the others, blanks as a character and BOS before a text, as Llama 2."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=specials, show_progress=False)
    tokenizer.train_from_iterator([TEXT * 20], trainer)
    said = json.loads(tokenizer.to_str())
    said["added_tokens"] = said["added_tokens"][:3]  # bytes are ordinary tokens
    tokenizer = Tokenizer.from_str(json.dumps(said))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    about = dict(
        bos_token="<s>", eos_token="</s>", unk_token="<unk>", add_bos_token=True, clean_up_tokenization_spaces=False
    )
    named = {"bos_token": {"content": "<s>", "lstrip": False, "rstrip": False, "normalized": False}}
    _saved(path, tokenizer, about, {"special_tokens_map.json": named})
    sizes = {**SIZES, "intermediate_size": 64, "vocab_size": 340, "initializer_range": 0.3, "rms_norm_eps": 1e-5}
    yield transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


FOLDERS: Mapping[str, Callable[[Path], Iterator[Any]]] = dict(
    llama=_llama, gpt2=_gpt2, qwen3=_qwen3, neox=_neox, sentencepiece=_sentencepiece
)
