"""The demo model's training at toy size: tokenizer, loop, resume, export, and the file in tmla's float64 reference."""

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch trains the demo model; tmla itself does not need it")

from tmla import reference  # noqa: E402
from tmla.config import MLAConfig, check_tensors  # noqa: E402
from tmla.gguf_file import open_gguf  # noqa: E402
from tools.demo_model.export import export, load_tensors, read_tensors  # noqa: E402
from tools.demo_model.network import Network, Shape, rope_table  # noqa: E402
from tools.demo_model.tokens import encode_split, train_tokenizer  # noqa: E402
from tools.demo_model.train import load_weights, make_parser, train  # noqa: E402

SHAPE = Shape(
    vocabulary=300, layers=2, width=64, heads=2, latent=64, nope=32, rope=32, value=64, dense_width=96, expert_width=32,
    context=96, original_context=24,
)  # fmt: skip
TEXT = "the whale and the sea went down to the ship with a good deal of wind , said he ; I am sure of it ."


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the tokens of a toy corpus and its tokenizer."""
    out = tmp_path_factory.mktemp("demo")
    rng = np.random.default_rng(3)
    texts = [" ".join(rng.choice(TEXT.split(" "), 400)) for _ in range(4)]
    texts = ['"Is it a whale?" said he.\n\n"I am sure of it."\n\n' + t for t in texts]
    tokenizer = train_tokenizer(texts, SHAPE.vocabulary)
    tokenizer.save(str(out / "tokenizer.json"))
    documents = [{"source": s, "name": s, "text": t} for s, t in zip(("austen", "moby-dick", "kjv", "kjv"), texts)]
    arrays = {}
    for split, part in (("train", documents[:3]), ("valid", documents[3:])):
        arrays |= {f"{split}_{key}": value for key, value in encode_split(tokenizer, part).items()}
    np.savez(out / "tokens.npz", vocabulary=SHAPE.vocabulary, **arrays)
    return out


def run(folder, name, steps, *more):
    """Train for some steps and return the lines of the log."""
    options = f"--device cpu --batch-tokens 192 --length 48 --lr 0.01 --warmup 5 --evaluate 10 --rows 2 --steps {steps}"
    argv = [str(folder / "tokens.npz"), str(folder / name), *options.split(" "), *more]
    torch.set_num_threads(1)
    train(make_parser().parse_args(argv), SHAPE)
    return [json.loads(line) for line in (folder / name / "log.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def log(folder):
    return run(folder, "run", 40)


def test_training_learns(log):
    assert log[1]["valid"] > log[-1]["valid"] + 0.3
    assert log[-1]["valid"] < np.log(SHAPE.vocabulary) - 1.0


def test_training_goes_on_where_it_stopped(folder, log):
    run(folder, "stopped", 40, "--max-seconds", "0")  # ends after the steps that do not count
    resumed = run(folder, "stopped", 40)
    assert resumed[0]["steps"] == 40
    assert resumed[-1]["step"] == 40
    assert [line["step"] for line in resumed if "step" in line].count(40) == 1


def test_exported_file_is_the_trained_network(folder, log):
    path = folder / "toy.gguf"
    export(load_weights(folder / "run", SHAPE), folder / "tokenizer.json", path)
    with open_gguf(path) as gf:
        config = MLAConfig.from_gguf(gf)
        check_tensors(gf, config)
        np.testing.assert_allclose(config.softmax_scale, SHAPE.score_scale, rtol=1e-6)
    network = Network(SHAPE)
    load_tensors(network, read_tensors(path))
    network = network.double().eval()
    network.cos, network.sin = (t.double() for t in rope_table(SHAPE))
    tokens = np.random.default_rng(5).integers(0, SHAPE.vocabulary, 80)  # beyond the original context of 24
    with torch.no_grad():
        ours = network(torch.from_numpy(tokens)[None])[0].numpy()
    theirs = reference.logits(path, tokens)
    # both in float64; the table of cos and sin is rounded to float32 here
    assert np.abs(ours - theirs).max() < 1e-5 * theirs.std()
