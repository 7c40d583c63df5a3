"""A tiny model with a tokenizer as SentencePiece's: blanks before words, bytes for the rest."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, normalizers
from tokenizers.models import BPE

from .tiny import tiny_model_dir


def sentencepiece_model_dir(path: Path) -> Path:
    """Write a tiny model whose tokenizer prepends a blank, as Llama 2's."""
    tiny_model_dir(path)
    letters = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁"]
    letters += [*"Paristhegn[]/INSToulw", "▁Paris"]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(letters))}
    merges = [("▁", "P"), ("▁P", "a"), ("▁Pa", "r"), ("▁Par", "i"), ("▁Pari", "s")]
    for left, right in merges:
        vocabulary.setdefault(left + right, len(vocabulary))
    tokenizer = Tokenizer(BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))  # noqa: S106
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "LlamaTokenizer", "eos_token": "</s>", "bos_token": "<s>"}
    for name, entries in (("tokenizer_config", settings), ("config", {"eos_token_id": 2})):
        file = path / f"{name}.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | entries))
    return path
