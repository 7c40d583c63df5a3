"""A name to a model that can run: the embedded one, a directory, or a Hugging Face repo."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import mlx.core as mx

from . import open_files  # noqa: F401  # isort: skip  (the first import of mlx_lm)
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model

from ..backends import Name, choose
from ..backends.base import Backend
from ..errors import ModelLoadError, ModelNotFoundError, UnsupportedCacheError
from ..estimate.config import ModelConfig
from ..estimate.folder import require_regular
from ..kv.layout import CacheLayout
from ..params import KVQuantization
from ..text.codec import TextCodec
from . import embedded, embedded_file
from .checkpoint import NO_CODE, fingerprint, open_checkpoint
from .download import fetch
from .hub import is_repo
from .probe import failures_in_words
from .time_limit import TEMPLATE_LIMIT, within
from .tokenizer import ends_of, open_tokenizer, require_known_modules, sampling_defaults, token_ids
from .watch import Watch

LoadPhase = Literal["downloading", "loading"]
"""Phases of a load."""

_PIECE = 64 << 20  # bytes of weights that are read in one call: a few tens of milliseconds
_EMBEDDINGS = frozenset(
    {
        *("embed_tokens", "word_embeddings", "embeddings", "wte", "token_embeddings"),
        *("tok_embeddings", "embedding", "embed_in", "embed"),
    }
)
"""mlx-lm's names of the embedding of tokens."""


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run. Its arrays belong to the thread that loaded it."""

    name: str  # clients' name for it
    model: Any  # mlx-lm's module, evaluated
    text: TextCodec
    layout: CacheLayout
    fingerprint: str
    context_length: int  # upper bound of prompt and answer, in tokens
    weight_bytes: int
    backend: Backend
    sampling: Mapping[str, float] = field(default_factory=dict)  # defaults of sampling parameters


def load(
    name: str,
    quantization: KVQuantization | None = None,
    begin: Callable[[LoadPhase], object] = lambda _: None,
    watch: Watch | None = None,
) -> LoadedModel:
    """Load a model on the calling thread and evaluate its weights.

    `name` is `smollm2` (embedded), a directory, or a Hugging Face repo `org/name` or
    `org/name@revision`. `begin` receives each phase as it begins. On a CPU the weights are
    dequantised to fp32: MLX has no other fast type there.

    Raises:
        ModelNotFoundError: there is no such model, or it cannot be fetched.
        ModelLoadError: the files cannot be loaded.
        UnsupportedCacheError: its layers keep state that cannot be saved, or not be quantised.
    """
    source = find(name, begin, watch)
    begin("loading")
    opened = OpenedModel(source, quantization)
    opened.try_template()
    while opened.read_more():
        pass
    return opened.finish()


class Source(NamedTuple):
    """Place of a model's files: a folder, or the embedded model's file. `name` was asked for."""

    name: str
    path: Path


def find(
    name: str, begin: Callable[[LoadPhase], object] = lambda _: None, watch: Watch | None = None
) -> Source:
    """Find a model, and download it if need be; raise as `load` does. Safe from any thread."""
    if name == embedded_file.NAME:
        return Source(name, embedded_file.obtain(begin, watch))
    return Source(name, _directory(name, watch or Watch(), lambda: begin("downloading")))


class OpenedModel:
    """A model whose weights are read piece by piece. Belongs to the thread that will run it.

    Attributes:
        weight_bytes: size of the weights in memory once all are read.

    Raises:
        ModelNotFoundError: there is no model.
        ModelLoadError: the files cannot be loaded.
    """

    def __init__(
        self,
        source: Source,
        quantization: KVQuantization | None = None,
        backend: Name | None = None,
    ) -> None:
        self._source = source
        self._quantization = quantization
        self._backend = choose(backend)
        self._model, self._tokenizer, self._config, self._files = self._open()
        named = cast("list[tuple[str, mx.array]]", tree_flatten(self._model.parameters()))
        self._leaves = [leaf for _, leaf in named]
        self._read = 0
        self.weight_bytes = sum(leaf.nbytes for leaf in self._leaves)
        self._text = TextCodec(self._tokenizer, _embedding_rows(self._model))

    def _open(self) -> tuple[Any, Any, dict[str, Any], list[Path]]:
        (name, path), fp32 = self._source, self._backend.limits.fp32
        if name == embedded_file.NAME:
            dtype = mx.float32 if fp32 else mx.bfloat16
            model, tokenizer, config, _ = embedded.load(dtype, path)
            return model, tokenizer, config, [path]
        return _open_directory(path, fp32=fp32)

    def try_template(self) -> None:
        """Find the chat template's abilities, by rendering. Any thread may call it.

        Raises:
            ModelLoadError: the template does not end, or fails.
        """
        with failures_in_words(self._source.name):
            try:
                within(TEMPLATE_LIMIT, lambda: self._text.template.abilities)
            except TimeoutError as error:
                words = (
                    f"its chat template takes more than {TEMPLATE_LIMIT:g} seconds for a message"
                )
                raise ModelLoadError(f"cannot load {self._source.name}: {words}") from error

    def read_more(self) -> bool:
        """Read the next piece of the weights; return True if there is more."""
        piece, nbytes = list[mx.array](), 0
        for leaf in self._leaves[self._read :]:
            if piece and nbytes + leaf.nbytes > _PIECE:
                break
            piece.append(leaf)
            nbytes += leaf.nbytes
        try:
            mx.eval(piece)
        except Exception as error:  # MLX may raise anything for a truncated file
            raise ModelLoadError(f"cannot load {self._source.name}: {error}") from error
        self._read += len(piece)
        return self._read < len(self._leaves)

    def finish(self) -> LoadedModel:
        """Make the model ready, once all is read; raise UnsupportedCacheError as `load` does."""
        dtypes = ",".join(sorted({str(leaf.dtype) for leaf in self._leaves}))
        layout = CacheLayout(self._model, self._quantization)
        if self._quantization is not None:
            _try_quantized(self._model, layout)
        return LoadedModel(
            name=public_name(self._source.name),
            model=self._model,
            text=self._text,
            layout=layout,
            fingerprint=fingerprint(self._files, self._config, dtypes, self._quantization),
            context_length=ModelConfig(self._config).context_length,
            weight_bytes=self.weight_bytes,
            backend=self._backend,
            sampling=self._sampling(),
        )

    def _sampling(self) -> Mapping[str, float]:
        if self._source.name == embedded_file.NAME:
            return embedded_file.SAMPLING
        return sampling_defaults(self._source.path)


def _try_quantized(model: Any, layout: CacheLayout) -> None:
    """Fail now if the model's attention cannot read quantised keys and values."""
    cache = layout.open()
    try:
        for tokens in ([1, 2], [3]):
            mx.eval(model(mx.array([tokens]), cache=cache.layers))
    except Exception as error:  # a model that expects arrays may raise anything for triples
        words = f"the model cannot attend to quantised keys and values ({error})"
        raise UnsupportedCacheError(f"{words}: serve it without kv_bits") from error


def public_name(name: str) -> str:
    """Return a model's name for clients, which does not tell its folder's place.

    A folder is named by its last part, a link by its own name, and a snapshot in Hugging Face's
    cache by its repo.
    """
    if not Path(name).is_dir():
        return name
    folder = Path(name).absolute()
    if folder.name == "..":
        folder = folder.resolve()
    repo = folder.parent.parent.name
    if folder.parent.name == "snapshots" and repo.startswith("models--"):
        return repo.removeprefix("models--").replace("--", "/")
    return folder.name


def _directory(name: str, watch: Watch, begin: Callable[[], object]) -> Path:
    if Path(name).is_dir():
        return Path(name)
    if not is_repo(name):
        raise ModelNotFoundError(
            f"no model {name!r}: it is not the embedded {embedded_file.NAME!r}, "
            "not a directory, and not a Hugging Face repo of the form org/name"
        )
    return fetch(name, watch, begin)


def _open_directory(directory: Path, *, fp32: bool) -> tuple[Any, Any, dict[str, Any], list[Path]]:
    try:
        require_regular(directory)
        model, config, files = open_checkpoint(directory)
        if not _has_tokenizer(directory):
            raise ModelLoadError(f"its tokenizer is a tiktoken.model, and {NO_CODE}")  # noqa: TRY301
        require_known_modules(directory)
        tokenizer = open_tokenizer(directory, token_ids(config.get("eos_token_id")) or None)
        tokenizer.eos_token_ids = ends_of(directory, tokenizer)
        if fp32:
            model = dequantize_model(model)
            model.set_dtype(mx.float32)
    except ModelNotFoundError:
        raise
    except Exception as error:  # mlx-lm and transformers may raise anything for a bad file
        raise ModelLoadError(f"cannot load {directory}: {_advice(error)}") from error
    return model, tokenizer, config, files


def _has_tokenizer(directory: Path) -> bool:
    """True if a tokenizer can be read: a tiktoken.model needs code of its own."""
    readable = ("tokenizer.json", "tokenizer.model", "vocab.json")
    others = any((directory / name).exists() for name in readable)
    return others or not (directory / "tiktoken.model").exists()


def _advice(error: Exception) -> str:
    """Explain an error, without advice for callers of a library."""
    if "trust_remote_code" in str(error):
        return f"its tokenizer needs Python code of its own, and {NO_CODE}"
    return str(error)


def _embedding_rows(model: Any) -> int | None:
    """Count the tokens that a model has an embedding of; None if its layer is unknown.

    MLX does not check indices: a token beyond them reads memory after the array.
    """
    found = [
        module.weight.shape[0]
        for name, module in model.named_modules()
        if name.split(".")[-1] in _EMBEDDINGS and "weight" in module
    ]
    return min(found, default=None)
