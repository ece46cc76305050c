"""``tmla chat``: a conversation whose cache is reused."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Generator, Iterator, Sequence
from typing import Any

from tmla import cli_terminal as terminal
from tmla import info
from tmla.chat import ChatTemplate, Session
from tmla.cli_conversation import Conversation
from tmla.cli_run import REASONS, generation_options, load_with_bar, say_what_runs, warm_up
from tmla.cli_template import read_text
from tmla.errors import ContextError, ParameterError, TmlaError
from tmla.generate import Chunk, Stats, stream_generate
from tmla.model import Model
from tmla.requantize import open_checked
from tmla.sampling import Sampler
from tmla.state_file import open_state
from tmla.stops import StopScanner
from tmla.tokenizer import Tokenizer

_HELP = """/reset         forget the conversation
/system TEXT   set the system message, from the next answer on; without TEXT none
/save FILE     save the conversation with its cache
/load FILE     go on with a saved conversation, in the place of this one
/stats         tokens in the cache, and speed of the last answer
/quit          end, as Ctrl-D does; Ctrl-C stops an answer and keeps the conversation
//TEXT         a message that begins with a slash"""

Messages = list[dict[str, str]]


def chat(args: argparse.Namespace) -> int:
    """Talk until stdin ends; return the exit code."""
    Sampler(args.temp, args.top_k, args.top_p, args.min_p, args.seed)
    StopScanner(args.stop)
    if args.raw and args.system is not None:
        raise ParameterError("--system needs a template, and --raw has none; give one of the two")
    source = read_text(args.template) if args.template is not None else None
    if not args.raw:
        _try_template(args, source)
    model, load_s, compile_s = load_with_bar(args)
    say_what_runs(model)
    compile_s += warm_up(model)
    terminal.say(f"{model.arch}: load {load_s:.2f} s; compile {compile_s:.2f} s")
    session = RawSession(model) if args.raw else Session(model, source)
    interactive = sys.stdin.isatty()
    if interactive:
        terminal.say("/help lists what can be said besides messages; Ctrl-D ends")
    talk = Talk(session, args, interactive)
    for line in _lines(interactive):
        if not talk.take(line):
            break
    return 0


def _try_template(args: argparse.Namespace, source: str | None) -> None:
    """Fail before the weights are loaded if the template does with a first message."""
    gf, _ = open_checked(args.file, overrides=dict(args.override), requantize=args.requantize)
    with gf:
        template = ChatTemplate(Tokenizer.from_gguf(gf), gf.metadata, gf.name, source)
    template.encode([*_system(args.system), {"role": "user", "content": "Hello"}])


def _system(text: str | None) -> Messages:
    return [] if text is None else [{"role": "system", "content": text}]


class RawSession:
    """Plain continuation in the place of :class:`tmla.chat.Session`: each message on a line of its own.

    Attributes
    ----------
    tokens : list of int
        What the cache holds.
    said : list of int
        All that was said; its last token has often not been fed.
    """

    def __init__(self, model: Model):
        self.model = model
        self.tokens: list[int] = []
        self.said: list[int] = []

    def stream(self, messages: Sequence[dict[str, str]], **parameters: Any) -> Generator[Chunk, None, None]:
        """Continue all that was said and the last message; parameters and errors as of :class:`tmla.chat.Session`."""
        text, tokenizer = messages[-1]["content"], self.model.tokenizer
        begins = len(messages) == 1 or not self.said
        said = [] if begins else self.said
        new = tokenizer.encode_prompt(text) if begins else tokenizer.encode("\n" + text, add_bos=False)
        ids = [*said, *new]
        self.model.rewind(min(len(said), len(self.tokens), self.model.n_past))
        self.tokens = said[: self.model.n_past]
        fed = list(self.tokens)
        chunks = stream_generate(self.model, ids[len(fed) :], keep=True, history=fed, **parameters)
        return self._follow(chunks, ids)

    def _follow(self, chunks: Generator[Chunk, None, None], ids: list[int]) -> Generator[Chunk, None, None]:
        said = list(ids)
        try:
            for chunk in chunks:
                if chunk.token is not None and chunk.reason != "eos":
                    said.append(chunk.token)
                yield chunk
        finally:
            chunks.close()
            self.said, self.tokens = said, said[: self.model.n_past]


class Talk:
    """One conversation on a terminal or a pipe.

    Parameters
    ----------
    session : Session or RawSession
    args : argparse.Namespace
        Of ``tmla chat``.
    interactive : bool
        A person types: a message that does not fit is told, and the conversation goes on.
    """

    def __init__(self, session: Session | RawSession, args: argparse.Namespace, interactive: bool):
        self.session, self.args, self.interactive = session, args, interactive
        self.system: str | None = args.system
        self.messages: Messages = []
        self.stats: Stats | None = None
        self.n_reused = 0

    def take(self, line: str) -> bool:
        """Do what a line says; false if it ends the conversation."""
        line = line.strip()
        if not line:
            return True
        if not line.startswith("/") or line.startswith("//"):
            self._answer(line[1:] if line.startswith("//") else line)
            return True
        command, _, text = line.partition(" ")
        if command == "/quit":
            return False
        self._obey(command, text.strip())
        return True

    def _obey(self, command: str, text: str) -> None:
        if command == "/reset":
            self.messages, self.stats, self.n_reused = [], None, 0
            self.session.model.reset()
            self.session.tokens = []
            terminal.say("the conversation is forgotten")
        elif command == "/system" and self.args.raw:
            terminal.say("there is no system message without a template (--raw)")
        elif command == "/system":
            self.system = text or None
            terminal.say("the system message is set" if text else "there is no system message")
        elif command == "/stats":
            terminal.say(self._stats_line())
        elif command in ("/save", "/load"):
            self._file(command, text)
        else:
            if command != "/help":
                terminal.say(f"{terminal.printable(command)} is unknown")
            for row in _HELP.splitlines():
                terminal.say(row)

    def _file(self, command: str, path: str) -> None:
        try:
            if not path:
                raise ParameterError(f"{command} needs the name of a file")
            (self._save if command == "/save" else self._load)(path)
        except TmlaError as e:
            if not self.interactive:
                raise
            terminal.say(f"error: {e}")

    def _save(self, path: str) -> None:
        session = self.session
        session.model.rewind(len(session.tokens))  # what an interrupted answer left behind is not to be saved
        said = session.said if isinstance(session, RawSession) else None
        n_bytes = session.model.save_state(path, Conversation(self.messages, self.system, said).note())
        terminal.say(f"saved: {len(self.messages)} messages, {len(session.tokens)} tokens, {info.size(n_bytes)}")

    def _load(self, path: str) -> None:
        session = self.session
        saved = open_state(path)
        conversation = Conversation.of(saved, raw=isinstance(session, RawSession))
        session.model.restore_from(saved)
        session.tokens = saved.tokens
        if isinstance(session, RawSession) and conversation.said is not None:
            session.said = conversation.said
        self.messages, self.system, self.stats = conversation.messages, conversation.system, None
        terminal.say(f"loaded: {len(self.messages)} messages, {len(session.tokens)} tokens")

    def _answer(self, text: str) -> None:
        args = self.args
        messages = [*self.messages, {"role": "user", "content": text}]
        try:
            chunks = self.session.stream([*_system(self.system), *messages], **generation_options(args))
        except ContextError as e:
            if not self.interactive:
                raise
            terminal.say(f"error: {e}; /reset begins anew")
            return
        n_reused = len(self.session.tokens)
        pieces: list[str] = []
        out = terminal.ModelText()
        try:
            with contextlib.closing(chunks):
                last = Chunk("", None)
                for last in chunks:
                    pieces.append(last.text)
                    out.write(last.text)
        except KeyboardInterrupt:
            out.end()
            self._keep_certain()
            if not self.interactive:
                raise
            terminal.say("stopped; the conversation goes on")
        else:
            out.end()
            self.stats, self.n_reused = last.stats, n_reused
            if last.reason != "eos":
                terminal.say(f"ended: {REASONS[str(last.reason)]}")
        if answer := "".join(pieces):
            self.messages = [*messages, {"role": "assistant", "content": answer}]

    def _keep_certain(self) -> None:
        """The step that was interrupted may have left its cache row half written: it is not to be used again."""
        self.session.tokens = self.session.tokens[: max(0, self.session.model.n_past - 1)]

    def _stats_line(self) -> str:
        model = self.session.model
        n_messages = len(self.messages)
        parts = [f"{n_messages} message{'s' * (n_messages != 1)}", f"cache {model.n_past:,} of {model.n_ctx:,} tokens"]
        if (s := self.stats) is not None:
            parts.append(
                f"last answer: {self.n_reused} tokens reused, {s.prompt_tokens} read at {s.prompt_tok_s:.1f} tok/s"
            )
            parts.append(f"{s.n_tokens} written at {s.decode_tok_s:.1f} tok/s")
        return "; ".join([*parts, f"memory {info.size(model.memory['total'])}"])


def _lines(interactive: bool) -> Iterator[str]:
    """Lines of stdin until its end; on a terminal with a prompt, line editing and history."""
    if interactive:
        with contextlib.suppress(ImportError):  # Windows has no readline
            import readline  # noqa: F401  (input() uses it from now on)
    while True:
        try:
            line = input("> " if sys.stdout.isatty() else "") if interactive else sys.stdin.readline()
        except EOFError:
            terminal.write("\n")
            return
        except KeyboardInterrupt:
            if not interactive:
                raise
            terminal.write("\n")
            terminal.say("Ctrl-D or /quit ends")
            continue
        except UnicodeDecodeError as e:
            raise ParameterError(f"stdin is not valid UTF-8: {e.reason}; convert it first") from None
        if not interactive and not line:
            return
        yield line
