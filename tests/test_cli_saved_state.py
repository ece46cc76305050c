"""``tmla run --prompt-cache`` and ``/save`` and ``/load`` in ``tmla chat``: what is reused, refused, interrupted."""

import io
import json
import sys

import pytest

import tmla
from tests.conftest import backend
from tmla import atomic, cli, cli_chat, cli_run, prefill
from tmla.generate import generate, stream_generate
from tmla.loading import demo_path
from tmla.state_file import open_state

ARCH = backend()
N_CTX = 160
PROMPT = "It was a fine morning, and the captain"
FIRST, SECOND = "How do you do, Miss Bennet?", "Will you dance with me?"


@pytest.fixture(scope="module")
def model():
    return tmla.load(arch=ARCH, n_ctx=N_CTX, cache_dtype="f32")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "p.kv"


@pytest.fixture
def run(model, path, monkeypatch, capsys):
    """``tmla run --ids --prompt-cache``: exit code, ids, lines about the cache."""
    monkeypatch.setattr(cli_run, "load_with_bar", lambda args: (model, 0.0, 0.0))

    def call(*args, cache=path):
        code = cli.main(["run", str(demo_path()), "--ids", "--prompt-cache", str(cache), *map(str, args)])
        out, err = capsys.readouterr()
        return code, out, [line for line in err.splitlines() if "prompt cache" in line or "error" in line]

    return call


@pytest.fixture
def chat(model, monkeypatch, capsys):
    """``tmla chat`` with lines on a pipe: exit code, stdout, stderr behind the start."""
    monkeypatch.setattr(cli_chat, "load_with_bar", lambda args: (model, 0.0, 0.0))

    def call(*lines, args=()):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        code = cli.main(["chat", str(demo_path()), "--temp", "0", "-n", "9", *args])
        out, err = capsys.readouterr()
        return code, out, err.partition("compile ")[2].partition("\n")[2] or err

    return call


def ids_of(model, prompt, n):
    return ",".join(str(c.token) for c in stream_generate(model, prompt, max_tokens=n, ignore_eos=True)) + "\n"


# run


def test_a_prompt_is_reused(run, model, path):
    n = len(model.tokenizer.encode_prompt(PROMPT))
    alone = ids_of(model, PROMPT, 9)
    code, out, (reused, saved) = run("-p", PROMPT, "-n", 9, "--ignore-eos")
    assert (code, out) == (0, alone)
    assert reused == f"tmla: prompt cache p.kv: 0 of {n} prompt tokens reused"
    assert saved.startswith(f"tmla: prompt cache p.kv: {n + 8} tokens saved, ")
    assert open_state(path).tokens == [*model.tokenizer.encode_prompt(PROMPT), *map(int, alone.split(",")[:8])]
    # the same again: the logits behind the last token are not in the file
    assert run("-p", PROMPT, "-n", 9, "--ignore-eos")[1:] == (
        alone, [f"tmla: prompt cache p.kv: {n - 1} of {n} prompt tokens reused", saved],
    )  # fmt: skip
    # longer: by its own continuation, and by something else
    longer = [*open_state(path).tokens, 17, 18]
    assert run("--tokens", ",".join(map(str, longer)), "-n", 5, "--ignore-eos")[:2] == (0, ids_of(model, longer, 5))
    other = [*longer[: n + 2], 9, 8, 7, 6, 5, 4]
    code, out, (reused, _) = run("--tokens", ",".join(map(str, other)), "-n", 5, "--ignore-eos")
    assert (code, out) == (0, ids_of(model, other, 5))
    assert reused.endswith(f"{n + 2} of {n + 8} prompt tokens reused")
    # shorter than what is there
    code, out, (reused, saved) = run("--tokens", ",".join(map(str, other[:5])), "-n", 0)
    assert (code, out) == (0, "")
    assert reused.endswith(" 4 of 5 prompt tokens reused")
    assert saved.startswith("tmla: prompt cache p.kv: 5 tokens saved, ")


def test_sampling_with_a_seed_is_the_same(run):
    args = ("-p", PROMPT, "-n", 9, "--temp", 0.9, "--seed", 4)
    first, again = run(*args), run(*args)
    assert first[1] == again[1]
    assert first[2] != again[2]


def test_ctrl_c_keeps_what_is_certain(run, model, path, monkeypatch):
    """The step at work leaves a row half written: here a wrong one."""
    monkeypatch.setattr(prefill, "split", lambda n, largest: [])  # each token of the prompt is a step
    step, left = model._step, [len(model.tokenizer.encode_prompt(PROMPT)) + 1 + 5]  # with the step that compiles

    def interrupted(token, logits=True):
        left[0] -= 1
        step(token if left[0] else (token + 1) % 4096, logits)
        if not left[0]:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(model, "_step", interrupted)
        code, out, (_, saved) = run("-p", PROMPT, "-n", 9, "--temp", 0.01, "--seed", 1, "--ignore-eos")
    n = len(model.tokenizer.encode_prompt(PROMPT))
    assert code == 130
    assert f": {n + 4} tokens saved" in saved
    assert len(out.split(",")) == 5
    whole = run("-p", PROMPT, "-n", 9, "--temp", 0.01, "--seed", 1, "--ignore-eos", cache=path.with_name("q.kv"))
    assert whole[1].startswith(out.removesuffix("\n"))
    assert open_state(path).tokens == open_state(path.with_name("q.kv")).tokens[: n + 4]
    fed = ",".join(map(str, [*open_state(path).tokens, int(out.split(",")[-1])]))
    assert run("--tokens", fed, "-n", 3, "--ignore-eos")[1] == run(
        "--tokens", fed, "-n", 3, "--ignore-eos", cache=path.with_name("r.kv")
    )[1]  # fmt: skip


def test_ctrl_c_within_the_prompt_saves_nothing(run, model, path, monkeypatch):
    """In the third chunk of a prompt, which is left with wrong rows; what is in the cache's file stays as it was."""
    prompt = [(7 * i) % 1000 + 10 for i in range(60)]
    text = ",".join(map(str, prompt))
    run("--tokens", "10,17,24", "-n", 0)
    before = path.read_bytes()
    monkeypatch.setattr(prefill, "split", lambda n, largest: [16] * (n // 16))
    chunk, positions = model._prefill.run, []

    def interrupted(tokens, pos0):
        positions.append(pos0)
        chunk(tokens if len(positions) < 3 else [t + 1 for t in tokens], pos0)
        if len(positions) == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(model._prefill, "run", interrupted)
        code, out, lines = run("--tokens", text, "-n", 5)
    assert (code, out.strip(), positions) == (130, "", [3, 19, 35])
    assert lines == ["tmla: prompt cache p.kv: 3 of 60 prompt tokens reused"]
    assert path.read_bytes() == before
    assert (model.n_past, model.tokens) == (35, prompt[:35])
    code, out, _ = run("--tokens", text, "-n", 5, "--ignore-eos")
    assert (code, out) == (0, ids_of(model, prompt, 5))


def test_ctrl_c_while_saving_is_130_and_keeps_the_old_file(run, path, monkeypatch):
    run("-p", PROMPT, "-n", 2)
    before = path.read_bytes()

    def interrupted(fd):
        raise KeyboardInterrupt

    monkeypatch.setattr(atomic.os, "fsync", interrupted)
    assert run("-p", f"{PROMPT} and", "-n", 2)[0] == 130
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_files_that_are_refused_before_loading(path, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cli_run, "load_with_bar", lambda args: pytest.fail("loaded"))

    def refused(file, message):
        assert cli.main(["run", str(demo_path()), "-p", "x", "--prompt-cache", str(file)]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert message in err

    path.write_bytes(b"tmla-kv\nand more")
    refused(path, "p.kv: has version ")
    path.write_text("Dear Jane")
    refused(path, "p.kv: begins with b'Dear Jan'")
    assert path.read_text() == "Dear Jane"
    refused(tmp_path, "is no regular file")
    refused(tmp_path / "none" / "x.kv", "there is no folder")


def test_a_state_of_another_model_is_refused_before_compiling(run, model, path, monkeypatch):
    run("-p", PROMPT, "-n", 1)
    before = path.read_bytes()
    monkeypatch.setitem(model.__dict__, "fingerprint", "another")
    monkeypatch.setattr(cli_run, "warm_up", lambda model: pytest.fail("compiled"))
    code, out, (line,) = run("-p", PROMPT, "-n", 1)
    assert (code, out) == (2, "")
    assert "p.kv: was saved by 'tmla demo'" in line
    assert path.read_bytes() == before


def test_a_conversation_is_not_overwritten(run, chat, path):
    chat(FIRST, f"/save {path}")
    before = path.read_bytes()
    code, _, (line,) = run("-p", PROMPT, "-n", 1)
    assert code == 2
    assert "p.kv: holds a conversation, which a run would lose" in line
    assert path.read_bytes() == before


# chat


@pytest.mark.parametrize("args", [(), ("--raw",)])
def test_a_conversation_goes_on(chat, path, args):
    _, whole, _ = chat(FIRST, SECOND, args=args)
    code, first, err = chat(FIRST, f"/save {path}", args=args)
    assert code == 0
    n = len(open_state(path).tokens)
    assert f"tmla: saved: 2 messages, {n} tokens, " in err
    code, second, err = chat("Good day.", f"/load {path}", SECOND, "/stats", args=args)
    assert code == 0
    assert f"tmla: loaded: 2 messages, {n} tokens\n" in err
    assert "tmla: 4 messages; " in err
    assert int(err.partition("last answer: ")[2].split()[0]) >= n - 1 > 10
    assert second.splitlines()[-1] == whole.splitlines()[-1]
    assert first + second.splitlines(keepends=True)[-1] == whole


def test_the_system_message_comes_back(chat, model, path):
    chat("/system You are Captain Ahab.", FIRST, f"/save {path}")
    _, out, _ = chat(f"/load {path}", SECOND)
    _, whole, _ = chat("/system You are Captain Ahab.", FIRST, SECOND)
    assert out == whole.splitlines(keepends=True)[-1]


def test_an_interrupted_answer_can_be_saved(model, path, monkeypatch, capsys):
    talk = cli_chat.Talk(cli_chat.Session(model), cli._parser().parse_args(["chat", "--temp", "0", "-n", "30"]), True)
    model.reset()
    advance, left = model._steps.advance, [14]

    def interrupted():
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        advance()

    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["tmla.generate"], "_GREEDY_AHEAD_S", 1e9)  # the device always runs ahead
        patch.setattr(model._steps, "advance", interrupted)
        talk.take("Tell me of the whale.")
        talk.take("Tell me more of the whale.")
    assert left[0] <= 0
    assert "stopped; the conversation goes on" in capsys.readouterr().err
    talk.take(f"/save {path}")
    assert "error" not in capsys.readouterr().err
    assert open_state(path).tokens == talk.session.tokens == model.tokens


def test_chat_names_what_it_cannot_do(chat, model, run, path, tmp_path, capsys):
    run("-p", PROMPT, "-n", 1)
    other, raw = tmp_path / "letter.txt", tmp_path / "raw.kv"
    other.write_text("Dear Jane")
    chat(FIRST, f"/save {raw}", args=("--raw",))
    for line, message in (
        ("/save", "/save needs the name of a file"),
        ("/load", "/load needs the name of a file"),
        (f"/load {tmp_path / 'none'}", "none: does not exist"),
        (f"/load {other}", "letter.txt: begins with b'Dear Jan'"),
        (f"/save {other}", "letter.txt: exists, begins with b'Dear Jan' and is no state"),
        (f"/load {path}", "p.kv: holds no conversation"),
        (f"/load {raw}", "raw.kv: its conversation was held with --raw"),
    ):
        code, out, err = chat(line)
        assert (code, out) == (2, "")  # on a pipe nobody can answer
        assert err == f"tmla: error: {err[13:]}"
        assert message in err
    talk = cli_chat.Talk(cli_chat.Session(model), cli._parser().parse_args(["chat", "--temp", "0"]), interactive=True)
    assert talk.take(f"/load {other}")
    assert capsys.readouterr().err.startswith("tmla: error: letter.txt: ")
    assert talk.take(FIRST)
    assert capsys.readouterr().out == generate(model, talk.session.template.encode(talk.messages[:1])) + "\n"


@pytest.mark.parametrize(
    "chat_note",
    [
        None, [], {}, {"messages": [], "system": None}, {"messages": {}, "system": None, "said": None},
        {"messages": [{"role": "root", "content": "x"}], "system": None, "said": None},
        {"messages": [{"role": "user", "content": 5}], "system": None, "said": None},
        {"messages": [{"role": "user"}], "system": None, "said": None},
        {"messages": ["x"], "system": None, "said": None}, {"messages": [], "system": 5, "said": None},
        {"messages": [], "system": None, "said": 5}, {"messages": [], "system": None, "said": [True]},
        {"messages": [], "system": None, "said": [5, 6]},
    ],
)  # fmt: skip
def test_notes_of_another_form(model, chat, path, chat_note):
    model.reset()
    model.prefill([5, 7])
    model.save_state(path, {"chat": chat_note})
    for args in ((), ("--raw",)):
        code, _, err = chat(f"/load {path}", args=args)
        assert code == 2
        assert err.startswith("tmla: error: p.kv: ")
    assert json.dumps(chat_note) == json.dumps(open_state(path).header.note["chat"])
