"""Train the demo model.

    python -m tools.demo_model.train build/demo/tokens.npz build/demo/run

Writes to the run folder: ``log.jsonl``, ``last.pt`` (everything that is needed to go on: start the same command again)
and, whenever the validation loss is the lowest so far, ``best-*.npz`` (the weights in f32, in parts below 16 MB).
Stops early when validation has not improved for `--patience` evaluations.
"""

import argparse
import dataclasses
import json
import math
import time
from pathlib import Path

import numpy as np
import torch

from tools.demo_model.corpus import SOURCES
from tools.demo_model.network import Network, Shape, count_parameters
from tools.demo_model.tokens import BOS, PAD

SOURCE_WEIGHTS = {"austen": 0.34, "moby-dick": 0.10, "kjv": 0.20, "addresses": 0.28, "chat": 0.08}
PART_BYTES = 15_000_000
READY_AT = 20  # steps after which everything is compiled; the time before does not count as progress


class Windows:
    """Random training windows and fixed validation windows, on the device.

    Every window starts with bos, wherever in a document it begins: generation starts so, too.
    """

    def __init__(self, path, device, seed):
        arrays = np.load(path)
        self.device, self.vocabulary = device, int(arrays["vocabulary"])
        self.generator = torch.Generator(device=device).manual_seed(seed)
        self.train = self._to(arrays["train_ids"])
        self.chat = self._to(arrays["train_chat"])
        self.chat_starts = self._to(arrays["train_chat_starts"])
        self.valid = self._to(arrays["valid_ids"])
        starts, source = arrays["train_starts"], arrays["train_source"]
        ends = np.append(starts[1:], len(arrays["train_ids"]))
        # documents are in the order of the sources: each source is one range of the stream
        present = [n for n in range(len(SOURCES)) if (source == n).any()]
        names = [list(SOURCES)[n] for n in present] + ["chat"] * bool(len(self.chat_starts))
        share = np.cumsum([SOURCE_WEIGHTS[name] for name in names])
        self.stops = torch.tensor(share / share[-1], dtype=torch.float32, device=device)
        self.is_chat = torch.tensor([name == "chat" for name in names], device=device)
        self.low = self._to(np.array([starts[source == n][0] for n in present] + [0]))
        self.high = self._to(np.array([ends[source == n][-1] for n in present] + [0]))

    def _to(self, array):
        return torch.from_numpy(array.astype(np.int64)).to(self.device)

    def _random(self, n):
        return torch.rand(n, generator=self.generator, device=self.device)

    def batch(self, n, length):
        """Inputs and targets [n, length]; target -100 where nothing is to be learned."""
        source = torch.bucketize(self._random(n), self.stops).clamp(max=len(self.stops) - 1)
        low, high = self.low[source], self.high[source]
        place = low + (self._random(n) * (high - low - length).clamp(min=1)).long()
        steps = torch.arange(length + 1, device=self.device)
        window = self.train[(place[:, None] + steps).clamp(max=len(self.train) - 1)]
        pick = (self._random(n) * len(self.chat_starts)).long()
        if len(self.chat_starts):  # they begin with a dialogue and run on into the next ones, round the end
            chat = self.chat[(self.chat_starts[pick][:, None] + steps) % len(self.chat)]
            window = torch.where(self.is_chat[source][:, None], chat, window)
        inputs = window[:, :-1].clone()
        inputs[:, 0] = BOS
        return inputs, window[:, 1:].masked_fill(window[:, 1:] == PAD, -100)

    def validation(self, length):
        """The validation text in windows that follow one another: inputs and targets [n, length]."""
        n = (len(self.valid) - 1) // length
        inputs = self.valid[: n * length].view(n, length).clone()
        inputs[:, 0] = BOS
        return inputs, self.valid[1 : n * length + 1].view(n, length)


@torch.no_grad()
def validate(network, windows, length, rows):
    """Mean cross entropy in nats a token over the validation windows."""
    network.eval()
    inputs, targets = windows.validation(length)
    total = 0.0
    for start in range(0, len(inputs), rows):
        with autocast(inputs.device):
            loss, _ = network.loss(inputs[start : start + rows], targets[start : start + rows])
        total += loss.item() * len(inputs[start : start + rows])
    network.train()
    return total / len(inputs)


def autocast(device):
    """bf16 arithmetic on a GPU, plain f32 elsewhere."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")


def progress(args, state):
    """Share of the training that is done: by steps, or by time where that runs out first."""
    done = state["step"] / args.steps
    if args.max_seconds is not None and state["step"] > READY_AT:
        done = max(done, (state["spent"] - state["ready"]) / max(1e-9, args.max_seconds - state["ready"]))
    return done


def learning_rate(args, step, done):
    """Warm-up, then a cosine down to a fiftieth."""
    warm = min(1.0, (step + 1) / args.warmup)
    return args.lr * warm * (0.02 + 0.98 * 0.5 * (1.0 + math.cos(math.pi * min(1.0, done))))


def save_weights(folder, network):
    """Write the weights as ``best-0.npz``, ``best-1.npz``, ...: f32 arrays under PyTorch's names."""
    parts, size = [{}], 0
    for name, value in network.state_dict().items():
        array = value.detach().float().cpu().numpy()
        if size + array.nbytes > PART_BYTES and parts[-1]:
            parts.append({})
            size = 0
        parts[-1][name] = array
        size += array.nbytes
    for n, part in enumerate(parts):
        np.savez(folder / f"best-{n}.npz", **part)


def load_weights(folder, shape, dtype=torch.float32):
    """The network that `save_weights` wrote, in eval mode on the CPU."""
    arrays = {}
    for path in sorted(Path(folder).glob("best-*.npz")):
        arrays |= dict(np.load(path))
    network = Network(shape)
    network.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()})
    return network.to(dtype).eval()


def make_optimizer(network, args, device):
    """AdamW; decay on matrices alone."""
    matrices = [p for p in network.parameters() if p.ndim == 2]
    vectors = [p for p in network.parameters() if p.ndim != 2]
    groups = [{"params": matrices, "weight_decay": args.decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=device.type == "cuda")


def train(args, shape):
    """Run the training loop; returns the lowest validation loss."""
    began = time.monotonic()
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device(args.device)
    windows = Windows(args.tokens, device, args.seed)
    shape = dataclasses.replace(shape, vocabulary=windows.vocabulary)
    network = Network(shape, args.dropout).to(device)
    optimizer = make_optimizer(network, args, device)
    args.run.mkdir(parents=True, exist_ok=True)
    state = {"step": 0, "best": math.inf, "worse": 0, "spent": 0.0, "ready": 0.0}
    last = args.run / "last.pt"
    if last.exists():
        saved = torch.load(last, map_location=device, weights_only=False)
        network.load_state_dict(saved["network"])
        optimizer.load_state_dict(saved["optimizer"])
        windows.generator.set_state(saved["generator"].cpu())
        state = saved["state"]
    if args.compile:
        for block in network.blocks:
            block.compile(dynamic=False)
    total, active = count_parameters(network)
    report(args, {"parameters": total, "active": active, "device": device.type, **vars(args)})
    spent_before = state["spent"]
    while (done := progress(args, state)) < 1.0 and state["worse"] < args.patience:
        step = state["step"]
        # every other step sees whole contexts, in as many tokens
        length = shape.context if step % 2 else args.length
        inputs, targets = windows.batch(max(1, args.batch_tokens // length), length)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(args, step, done)
        with autocast(device):
            loss, balance = network.loss(inputs, targets)
        (loss + args.balance * balance).backward()
        norm = torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        state["step"] = step + 1
        state["spent"] = spent_before + time.monotonic() - began
        if step + 1 == READY_AT:
            state["ready"] = state["spent"]
        if (step + 1) % args.evaluate == 0 or progress(args, state) >= 1.0:
            with torch.compiler.set_stance("force_eager"):  # one shape more is not worth a compilation
                valid = validate(network, windows, min(1024, shape.context), args.rows)
            state["worse"] = 0 if valid < state["best"] else state["worse"] + 1
            if valid < state["best"]:
                state["best"] = valid
                save_weights(args.run, network)
            numbers = {"step": step + 1, "seconds": state["spent"], "train": loss.item()}
            numbers |= {"valid": valid, "balance": balance.item(), "norm": norm.item(), "best": state["best"]}
            report(args, numbers)
            if args.checkpoint:
                saved = {"network": network.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(saved | {"generator": windows.generator.get_state(), "state": state}, last)
    return state["best"]


def report(args, numbers):
    """Append one line to the log and show it."""
    line = json.dumps({k: round(v, 5) if isinstance(v, float) else v for k, v in numbers.items()}, default=str)
    with (args.run / "log.jsonl").open("a", encoding="utf-8") as log:
        log.write(line + "\n")
    print(line, flush=True)


def make_parser():
    """Arguments of the command; the defaults are the shipped demo model's."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tokens", type=Path, help="tokens.npz of tools.demo_model.tokens")
    parser.add_argument("run", type=Path, help="folder for log, checkpoint and weights")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=2200)
    parser.add_argument("--batch-tokens", type=int, default=32768, help="tokens a step")
    parser.add_argument("--length", type=int, default=512, help="window of every other step; others: the context")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.25)
    parser.add_argument("--balance", type=float, default=0.01, help="weight of the balance loss")
    parser.add_argument("--evaluate", type=int, default=110, help="steps between evaluations")
    parser.add_argument("--patience", type=int, default=10, help="evaluations without a gain before it stops")
    parser.add_argument("--rows", type=int, default=16, help="validation windows at once")
    parser.add_argument("--max-seconds", type=float, help="end the schedule by then, however many steps that gives")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--checkpoint", action=argparse.BooleanOptionalAction, default=True)
    return parser


if __name__ == "__main__":
    train(make_parser().parse_args(), Shape())
