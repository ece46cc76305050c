"""``tmla chat`` and ``tmla template``: conversations on pipes and terminals, commands, Ctrl-C, templates that fail."""

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time

import pytest

import tmla
from tests.conftest import ROOT, backend
from tmla import cli, cli_chat, prefill
from tmla.chat import ChatTemplate
from tmla.errors import ContextError
from tmla.generate import generate
from tmla.loading import demo_path

ARCH = backend()
N_CTX = 160
FIRST, SECOND = "How do you do, Miss Bennet?", "Will you dance with me?"
LOUD = "tokenizer.chat_template={{ raise_exception('roles must alternate') }}"


@pytest.fixture(scope="module")
def model():
    return tmla.load(arch=ARCH, n_ctx=N_CTX, cache_dtype="f32")


@pytest.fixture
def chat(model, monkeypatch, capsys):
    """``tmla chat`` on the loaded model, with lines on a pipe: exit code, stdout, stderr behind the start."""
    monkeypatch.setattr(cli_chat, "load_with_bar", lambda args: (model, 0.0, 0.0))

    def call(*lines, args=("--temp", "0")):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        code = cli.main(["chat", str(demo_path()), *args])
        out, err = capsys.readouterr()
        return code, out, err.partition("compile ")[2].partition("\n")[2] or err

    return call


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def refused(capsys, *args):
    """The one line on stderr of a command that ends with 2 and prints nothing else."""
    assert cli.main([str(a) for a in args]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("tmla: error: ")
    assert captured.err.count("\n") == 1
    return captured.err


# conversations


def test_answers_are_those_of_the_library(chat, model):
    code, out, _ = chat(FIRST, "", SECOND)
    one = tmla.chat(model, [user(FIRST)], max_tokens=None)
    two = tmla.chat(model, [user(FIRST), assistant(one), user(SECOND)], max_tokens=None)
    assert (code, out) == (0, f"{one}\n{two}\n")


def test_the_cache_is_reused_and_told(chat):
    _, _, err = chat("/stats", FIRST, "/stats", SECOND, "/stats")
    before, first, second = err.splitlines()
    assert before.startswith("tmla: 0 messages; cache ")
    assert "tmla: 2 messages; cache " in first
    assert "; last answer: 0 tokens reused" in first
    assert f" of {N_CTX} tokens; " in second
    assert int(second.partition("last answer: ")[2].split()[0]) > 15


def test_reset_forgets(chat):
    _, out, err = chat(FIRST, "/reset", "/stats", FIRST, "/stats")
    assert out.splitlines()[0] == out.splitlines()[1]
    forgotten, empty, again = err.splitlines()
    assert forgotten == "tmla: the conversation is forgotten"
    assert empty.startswith("tmla: 0 messages; cache 0 of ")
    assert "; last answer: 0 tokens reused" in again


def test_system_message(chat, model):
    asked = chat("/system You are Captain Ahab.", FIRST)[1]
    assert asked == chat(FIRST, args=("--temp", "0", "--system", "You are Captain Ahab."))[1]
    messages = [{"role": "system", "content": "You are Captain Ahab."}, user(FIRST)]
    assert asked == tmla.chat(model, messages, max_tokens=None) + "\n"
    assert chat("/system You are Captain Ahab.", "/system", FIRST)[1] == chat(FIRST)[1] != asked


def test_commands(chat, model):
    code, out, err = chat("/dance", "/help", "/quit", FIRST)
    assert (code, out) == (0, "")
    assert "tmla: /dance is unknown\n" in err
    assert err.count("/reset") == 2
    assert chat("//reset")[1] == tmla.chat(model, [user("/reset")], max_tokens=None) + "\n"


def test_options_count(chat, model):
    code, out, err = chat(FIRST, args=("--temp", "0", "-n", "3"))
    assert (code, out) == (0, tmla.chat(model, [user(FIRST)], max_tokens=3) + "\n")
    assert err == "tmla: ended: as many tokens as asked for (-n)\n"
    warm = {seed: chat(FIRST, args=("--temp", "3", "--seed", seed, "-n", "9"))[1] for seed in "12"}
    assert warm["1"] != warm["2"]
    assert warm["1"] == chat(FIRST, args=("--temp", "3", "--seed", "1", "-n", "9"))[1]


def test_defaults():
    args = cli._parser().parse_args(["chat"])
    assert (args.file, args.temp, args.top_p, args.n) == (None, 0.7, 0.95, -1)


def test_raw_continues_plain_text(chat, model):
    args = ("--temp", "0", "--raw", "-n", "6")
    _, out, err = chat("It was a fine morning, and", "The captain", "/system x", args=args)
    first = generate(model, "It was a fine morning, and", max_tokens=6)
    second = generate(model, f"It was a fine morning, and{first}\nThe captain", max_tokens=6)
    assert out == f"{first}\n{second}\n"
    assert "no system message without a template" in err


def test_full_context(chat, model, capsys):
    long = "word " * N_CTX
    code, out, err = chat(long)
    assert (code, out) == (2, "")
    assert f"but the context holds {N_CTX}" in err
    talk = cli_chat.Talk(cli_chat.Session(model), cli._parser().parse_args(["chat", "--temp", "0"]), interactive=True)
    assert talk.take(long)
    assert capsys.readouterr().err.endswith("; /reset begins anew\n")
    assert talk.take(FIRST)
    assert capsys.readouterr().out == chat(FIRST)[1]


# Ctrl-C


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("n_steps", [1, 13, 17])
def test_ctrl_c_stops_the_answer_and_keeps_the_session(model, monkeypatch, capsys, n_steps, raw):
    """The step at work is left half done: what it wrote must not be used."""
    monkeypatch.setattr(prefill, "split", lambda n, largest: [])  # each token of a prompt is a step
    step, left = model._step, [n_steps]

    def interrupted(token, logits=True):
        left[0] -= 1
        if left[0] == 0:
            step((token + 1) % 4096, logits)  # a wrong row, and no one may see it
            raise KeyboardInterrupt
        step(token, logits)

    args = cli._parser().parse_args(["chat", "--temp", "0.01", "--seed", "3", "-n", "12", *["--raw"] * raw])
    session = cli_chat.RawSession(model) if raw else cli_chat.Session(model)
    talk = cli_chat.Talk(session, args, interactive=True)
    model.reset()
    with monkeypatch.context() as patch:
        patch.setattr(model, "_step", interrupted)
        assert talk.take(FIRST)
    assert left == [0]
    out, err = capsys.readouterr()
    assert err == "tmla: stopped; the conversation goes on\n"
    assert talk.messages == ([user(FIRST), assistant(out.removesuffix("\n"))] if out else [])
    assert len(session.tokens) < n_steps
    before = list(session.said) if raw else []
    talk.take(SECOND)
    answer = capsys.readouterr().out.removesuffix("\n")
    if raw and out:
        prompt = [*before, *model.tokenizer.encode(f"\n{SECOND}", add_bos=False)]
    else:
        prompt = SECOND if raw else session.template.encode(talk.messages[:-1])
    assert answer == generate(model, prompt, temperature=0.01, seed=3, max_tokens=12).removesuffix("\n")


def test_ctrl_c_within_a_chunk_of_the_prompt(model, monkeypatch, capsys):
    """As above, where the prompt's tokens go through together: of a chunk that was not finished nothing is used."""
    run, interrupted_at = model._prefill.run, []

    def interrupted(tokens, pos0):
        run([(t + 1) % 4096 for t in tokens], pos0)  # wrong rows
        interrupted_at.append(pos0)
        raise KeyboardInterrupt

    second = f"{SECOND} {FIRST} {SECOND}"  # enough for a chunk
    args = cli._parser().parse_args(["chat", "--temp", "0.01", "--seed", "3", "-n", "12"])
    session = cli_chat.Session(model)
    talk = cli_chat.Talk(session, args, interactive=True)
    model.reset()
    assert talk.take(FIRST)
    answer = capsys.readouterr().out.removesuffix("\n")
    said, n_past = [user(FIRST), assistant(answer)], model.n_past
    with monkeypatch.context() as patch:
        patch.setattr(model._prefill, "run", interrupted)
        assert talk.take(second)
    assert capsys.readouterr() == ("", "tmla: stopped; the conversation goes on\n")
    assert len(interrupted_at) == 1
    assert 0 < interrupted_at[0] <= n_past
    assert talk.messages == said
    assert model.n_past <= n_past
    talk.take(second)
    prompt = session.template.encode([*said, user(second)])
    answer = capsys.readouterr().out.removesuffix("\n")
    assert answer == generate(model, prompt, temperature=0.01, seed=3, max_tokens=12).removesuffix("\n")


def test_ctrl_c_on_a_pipe_ends(chat, model, monkeypatch):
    monkeypatch.setattr(prefill, "split", lambda n, largest: [])

    def interrupted(*args, **kw):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli_chat, "warm_up", lambda model: 0.0)
    monkeypatch.setattr(model, "_step", interrupted)
    assert chat(FIRST)[0] == 130


def test_on_a_terminal():
    """Prompt, answer, Ctrl-C at the prompt, Ctrl-D."""
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "tmla", "chat", "--arch", ARCH, "--temp", "0", "--ctx", "128"]
    environment = os.environ | {"TERM": "dumb"}
    p = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=subprocess.PIPE, cwd=ROOT, env=environment)
    os.close(slave)
    text = ""

    def read_until(end):
        nonlocal text
        start = time.monotonic()
        while not text.endswith(end):
            assert time.monotonic() - start < 120, text
            if select.select([master], [], [], 1.0)[0]:
                text += os.read(master, 4096).decode()
        seen, text = text, ""
        return seen

    try:
        read_until("> ")
        os.write(master, f"{FIRST}\n".encode())
        answer = read_until("> ")
        assert FIRST in answer  # the terminal's echo
        assert len(answer.splitlines()) == 3
        time.sleep(0.5)  # readline waits by now
        p.send_signal(signal.SIGINT)
        read_until("> ")
        os.write(master, b"\x04")
        _, err = p.communicate(timeout=60)
    finally:
        p.kill()
        os.close(master)
    assert p.returncode == 0
    assert "tmla: Ctrl-D or /quit ends\n" in err.decode()
    assert "Traceback" not in err.decode()


# templates


@pytest.fixture
def unloaded(monkeypatch):
    monkeypatch.setattr(cli_chat, "load_with_bar", lambda args: pytest.fail("loaded"))


@pytest.mark.usefixtures("unloaded")
def test_a_template_that_fails_stops_before_loading(capsys, tmp_path):
    line = refused(capsys, "chat", demo_path(), "--override", LOUD)
    for part in ("demo.gguf", "roles must alternate", "--template FILE", "--raw"):
        assert part in line
    path = tmp_path / "t.jinja"
    path.write_text("{% for m in messages %}")
    assert "--raw" in refused(capsys, "chat", demo_path(), "--template", path)
    assert "no such file" in refused(capsys, "chat", demo_path(), "--template", tmp_path / "none")
    path.write_bytes(b"\xff")
    assert "not valid UTF-8" in refused(capsys, "chat", demo_path(), "--template", path)
    assert "--system needs a template" in refused(capsys, "chat", demo_path(), "--raw", "--system", "x")
    assert "temperature is -1" in refused(capsys, "chat", demo_path(), "--temp", "-1")


def test_another_template(chat, model, tmp_path):
    path = tmp_path / "t.jinja"
    path.write_text("{{ bos_token }}It was said: {{ messages[-1]['content'] }}")
    args = ("--temp", "0", "-n", "5", "--template", str(path))
    assert chat(FIRST, args=args)[1] == generate(model, f"It was said: {FIRST}", max_tokens=5) + "\n"
    assert chat(FIRST, args=("--temp", "0", "-n", "5", "--override", LOUD, "--raw"))[0] == 0


MESSAGES = [{"role": "system", "content": "Be kind. <|user|>"}, user(FIRST), assistant("Très bien."), user(SECOND)]


@pytest.mark.parametrize("whole", [False, True])
def test_template_prints_prompt_and_ids(model, tmp_path, capsys, whole):
    path = tmp_path / "m.json"
    path.write_text(json.dumps({"messages": MESSAGES, "add_generation_prompt": False} if whole else MESSAGES))
    template = ChatTemplate.of(model)
    prompt = template.render(MESSAGES, add_generation_prompt=not whole)
    ids = template.encode(MESSAGES, add_generation_prompt=not whole)
    assert prompt.endswith("<|assistant|>") != whole
    assert cli.main(["template", str(demo_path()), "--messages", str(path)]) == 0
    captured = capsys.readouterr()
    assert captured.out == prompt + "\n" + ",".join(map(str, ids)) + "\n"
    assert captured.err == ""
    assert cli.main(["template", "--messages", str(path), "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"prompt": prompt, "ids": ids}
    assert captured.err.startswith("tmla: no FILE given: this is the demo model")


def test_template_refusals(capsys, tmp_path, monkeypatch):
    path = tmp_path / "m.json"

    def refusal(text, *args):
        path.write_text(text)
        return refused(capsys, "template", demo_path(), "--messages", path, *args)

    assert "m.json: no valid JSON" in refusal("[")
    assert "no 'messages'" in refusal("{}")
    assert "expected a list" in refusal('"Hello"')
    assert "there are no messages" in refusal("[]")
    assert "role" in refusal('[{"content": "x"}]')
    assert "roles must alternate" in refusal(json.dumps(MESSAGES), "--override", LOUD)
    assert "no such file" in refused(capsys, "template", demo_path(), "--messages", tmp_path / "none")
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(MESSAGES)))
    assert cli.main(["template", str(demo_path()), "--messages", "-"]) == 0


def test_context_error_is_the_librarys(model):
    with pytest.raises(ContextError):
        cli_chat.RawSession(model).stream([user("word " * N_CTX)])
