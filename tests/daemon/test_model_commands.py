"""`umbel models` as a user runs it, against a server that answers as Hugging Face does."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import _get_classes as get_classes
from mlx_lm.utils import quantize_model

from umbel.daemon.cli import app
from umbel.daemon.models.catalog import table
from umbel.models.estimate.layers import kinds_of

from ..fake_hub import COMMIT, GATED, REPO, FakeHub, serving
from .command import environment
from .running import eventually

TIMEOUT = 120


@pytest.fixture
def hub(tiny_dir: Path) -> Iterator[FakeHub]:
    """A hub that has the tiny model."""
    with serving(tiny_dir) as hub:
        yield hub


def start(hub: FakeHub, folder: Path, *words: str) -> "subprocess.Popen[str]":
    """Start the command with a cache of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "umbel", "models", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(folder) | hub.environment(folder / "hf"),
    )


def run_umbel(hub: FakeHub, folder: Path, *words: str) -> tuple[int, str, str]:
    """Run it to its end; its status, and what it printed."""
    process = start(hub, folder, *words)
    out, errors = process.communicate(timeout=TIMEOUT)
    assert "Traceback" not in errors
    return process.returncode, out, errors


def weights(hub: FakeHub) -> int:
    """Bytes of the model's weights."""
    return len(hub.files["model.safetensors"])


def partial(folder: Path) -> int:
    """Bytes that have come of them."""
    return sum(path.stat().st_size for path in (folder / "hf").rglob("*.partial"))


def test_a_model_is_pulled_and_listed(hub: FakeHub, short_path: Path) -> None:
    """It says how far it is, and that it is here; a second time nothing is fetched."""
    status, out, errors = run_umbel(hub, short_path, "pull", REPO)
    assert (status, hub.ranges) == (0, [0])
    assert out.startswith(f"{REPO} is here: ")
    assert "(100 %)" in errors
    status, out, _ = run_umbel(hub, short_path, "pull", REPO, "--json")
    pulled = json.loads(out)
    assert (status, pulled["bytes"]) == (0, sum(map(len, hub.files.values())))
    assert hub.ranges == [0]
    _, out, _ = run_umbel(hub, short_path, "list", "--json")
    (listed,) = [each for each in json.loads(out)["models"] if each["name"] == REPO]
    assert listed["fit"]["context"] == 2048
    assert listed["problem"] == ""


def test_a_model_is_removed(hub: FakeHub, short_path: Path) -> None:
    assert run_umbel(hub, short_path, "pull", REPO)[0] == 0
    status, out, _ = run_umbel(hub, short_path, "rm", REPO)
    assert (status, out.startswith(f"deleted {REPO}: ")) == (0, True)
    assert not list((short_path / "hf").rglob("*.safetensors"))
    for name in (REPO, "smollm2"):
        status, out, errors = run_umbel(hub, short_path, "rm", name)
        assert (status, out) == (1, "")
        assert f"there is no downloaded model {name}" in errors


def test_a_revision_can_be_named(hub: FakeHub, short_path: Path) -> None:
    """Only that one is asked for, and it is found again without the network."""
    status, out, _ = run_umbel(hub, short_path, "pull", f"{REPO}@v1.0", "--json")
    pulled = json.loads(out)
    assert (status, pulled["name"], hub.revisions) == (0, f"{REPO}@v1.0", {"v1.0"})
    assert Path(pulled["path"]).name == COMMIT
    hub.server.shutdown()
    hub.server.server_close()
    assert run_umbel(hub, short_path, "pull", f"{REPO}@v1.0", "--json")[:2] == (0, out)
    status, _, errors = run_umbel(hub, short_path, "pull", f"{REPO}@v2.0")
    assert status == 1
    assert f"{REPO}@v2.0 is not on this machine" in errors


def test_weights_of_other_names_are_pulled(hub: FakeHub, short_path: Path) -> None:
    """Where a repo has none of the usual ones."""
    hub.files["weights.safetensors"] = hub.files.pop("model.safetensors")
    status, out, _ = run_umbel(hub, short_path, "pull", REPO, "--json")
    assert (status, json.loads(out)["bytes"]) == (0, sum(map(len, hub.files.values())))


def test_folders_of_the_configuration_are_listed(
    hub: FakeHub, short_path: Path, tiny_dir: Path
) -> None:
    """The default model's, and those of further models, by their names there."""
    (short_path / "umbel.toml").write_text(f'[models.helper]\nmodel = "{tiny_dir}"\n')
    status, out, _ = run_umbel(
        hub, short_path, "list", "--json", "--config", str(short_path / "umbel.toml")
    )
    (listed,) = [each for each in json.loads(out)["models"] if each["source"] == "folder"]
    assert (status, listed["name"], listed["fit"]["context"]) == (0, "helper", 2048)


@pytest.mark.slow
def test_ctrl_c_keeps_what_has_come(hub: FakeHub, short_path: Path) -> None:
    """The next pull goes on from that byte; until then the list says that some is missing."""
    hub.go_on.clear()
    process = start(hub, short_path, "pull", REPO)
    half = weights(hub) // 2
    eventually(lambda: partial(short_path) == half, TIMEOUT)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=TIMEOUT)
    hub.go_on.set()
    assert process.returncode == 128 + signal.SIGINT
    assert "goes on where it ended" in errors
    assert partial(short_path) == half
    _, out, _ = run_umbel(hub, short_path, "list")
    assert f"not wholly here; `umbel models pull {REPO}` gets the rest" in out
    assert run_umbel(hub, short_path, "pull", REPO)[0] == 0
    assert hub.ranges == [0, half]


@pytest.mark.slow
def test_two_that_want_the_same_take_it_once(hub: FakeHub, short_path: Path) -> None:
    """The second waits for the first, and shows how far that is."""
    hub.go_on.clear()
    pulls = [start(hub, short_path, "pull", REPO) for _ in range(2)]
    eventually(lambda: partial(short_path) == weights(hub) // 2, TIMEOUT)
    hub.go_on.set()
    for each in pulls:
        out, errors = each.communicate(timeout=TIMEOUT)
        assert (each.returncode, out.startswith(f"{REPO} is here: ")) == (0, True), errors
    assert hub.ranges == [0]


@pytest.mark.slow
def test_what_is_damaged_is_fetched_anew(hub: FakeHub, short_path: Path) -> None:
    """A file is checked by its digest; nothing of one that differs is kept."""
    hub.spoils = True
    status, _, errors = run_umbel(hub, short_path, "pull", REPO)
    assert status == 1
    assert "model.safetensors of tests/tiny arrived damaged, and is removed" in errors
    hub.spoils = False
    assert run_umbel(hub, short_path, "pull", REPO)[0] == 0
    assert hub.ranges == [0, 0]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("pull", "tests/none"), "Hugging Face has no model tests/none, or it is private"),
        (("pull", GATED), "tests/gated is gated: accept its terms at"),
    ],
)
def test_what_cannot_be_done_is_told_in_words(
    hub: FakeHub, short_path: Path, words: tuple[str, ...], expected: str
) -> None:
    """With status 1, and nothing on standard output."""
    status, out, errors = run_umbel(hub, short_path, *words)
    assert (status, out) == (1, "")
    assert expected in " ".join(errors.split())


@pytest.mark.slow
def test_without_a_network_the_error_says_so(hub: FakeHub, short_path: Path) -> None:
    """And a model that is here is pulled all the same."""
    assert run_umbel(hub, short_path, "pull", REPO)[0] == 0
    hub.server.shutdown()
    hub.server.server_close()
    assert run_umbel(hub, short_path, "pull", REPO)[0] == 0
    status, _, errors = run_umbel(hub, short_path, "pull", "tests/other")
    assert status == 1
    assert "tests/other is not on this machine, or not wholly, and" in errors


# -- recommendations -----------------------------------------------------------------------


def recommended(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    """Ask for models in this process."""
    with pytest.raises(SystemExit) as end:
        app(["models", "recommend", "--json", *words])
    assert end.value.code == 0
    return json.loads(capsys.readouterr().out)


def test_more_memory_holds_more(capsys: pytest.CaptureFixture[str]) -> None:
    small = recommended(capsys, "--memory", "32GiB", "--device", "mac")["models"]
    large = recommended(capsys, "--memory", "128GiB", "--device", "mac")["models"]
    for before, after in zip(small, large, strict=True):
        assert before["fits"] <= after["fits"]
        assert before["fit"]["context"] <= after["fit"]["context"]
        assert before["agents"] <= after["agents"]
    assert sum(each["fits"] for each in small) < sum(each["fits"] for each in large)


def test_a_cpu_holds_weights_in_fp32(capsys: pytest.CaptureFixture[str]) -> None:
    """So a model takes several times what it takes on a GPU."""
    gpu = recommended(capsys, "--memory", "64GiB", "--device", "gpu")["models"]
    cpu = recommended(capsys, "--memory", "64GiB", "--device", "cpu")["models"]
    of_cpu = {each["repo"]: each["fit"]["weight_bytes"] for each in cpu}
    assert len(of_cpu) == len(gpu)
    for each in gpu:
        assert of_cpu[each["repo"]] > 6 * each["fit"]["weight_bytes"]


def test_the_best_is_first(capsys: pytest.CaptureFixture[str]) -> None:
    """From large to small what fits with an agent; then what fits without one; then the rest."""
    models = recommended(capsys, "--memory", "64GiB", "--device", "mac", "--history", "32768")
    ranks = [(not m["fits"], m["agents"] == 0, -m["download_bytes"]) for m in models["models"]]
    assert ranks == sorted(ranks)
    assert ranks[0][:2] == (False, False)
    assert {rank[0] for rank in ranks} == {False, True}


def test_the_table_is_for_people_too(hub: FakeHub, short_path: Path) -> None:
    """It names what fits, with `--all` also what does not, and the day of the table."""
    words = ("recommend", "--memory", "64GiB", "--device", "mac", "--history", "8192")
    status, out, _ = run_umbel(hub, short_path, *words)
    assert status == 0
    for said in ("weights and state may take 45.0 GiB", "the table is of 20"):
        assert said in out
    assert "conversations of 8192 tokens" in out
    assert "too large" not in out
    hidden = re.search(r"(\d+) more do not fit", out)
    assert hidden is not None
    status, everything, _ = run_umbel(hub, short_path, *words, "--all")
    assert len(everything.splitlines()) == len(out.splitlines()) + int(hidden[1]) - 1
    assert "too large" in everything
    assert "--all lists them" not in everything


def test_the_table_holds_what_the_models_are() -> None:
    """Each entry's weights are those of mlx-lm's own class, quantised as it says; none is made."""
    for entry in table().models:
        model = built(entry.config)
        numbers = sum(array.size for _, array in cast("Any", tree_flatten(model.parameters())))
        assert numbers == entry.numbers, entry.repo
        quantised, _ = quantize_model(model, dict(entry.config), **QUANTISED[entry.quantisation])
        found = sum(array.nbytes for _, array in cast("Any", tree_flatten(quantised.parameters())))
        assert found == entry.weight_bytes, entry.repo


def built(config: Any) -> Any:
    """Make a model whose weights are never computed."""
    kind, arguments = get_classes(dict(config))
    model = kind(arguments.from_dict(dict(config)))
    model.set_dtype(mx.bfloat16)
    return model


def mxfp4(path: str, module: Any) -> Any:
    """Quantise experts to MXFP4, and all else to 8 bits."""
    if not hasattr(module, "to_quantized"):
        return False
    experts = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    return experts if "experts" in path else {"group_size": 64, "bits": 8}


QUANTISED: dict[str, dict[str, Any]] = {
    "4 bits, groups of 64": {"group_size": 64, "bits": 4},
    "MXFP4 experts, else 8 bits": {"group_size": 64, "bits": 8, "quant_predicate": mxfp4},
}


def test_what_layers_keep_is_what_mlx_lm_makes_of_them() -> None:
    """Each layer of each model of the table has the cache that the estimate takes it to have."""
    kept = {"KVCache": "full", "RotatingKVCache": "window", "ArraysCache": "recurrent"}
    for entry in table().models:
        caches = make_prompt_cache(built(entry.config))
        kinds = [kept[type(cache).__name__] for cache in caches]
        assert kinds_of(entry.facts.config) == kinds, entry.repo
