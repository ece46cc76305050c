"""Conversations: messages to a prompt through the file's own chat template, and answers that reuse the cache."""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from .errors import ParameterError, TemplateError
from .generate import Chunk, stream_generate
from .template import render
from .text import unmark
from .tokenizer import Tokenizer

log = logging.getLogger(__name__)

Message = Mapping[str, Any]  # {"role": "user", "content": "..."}, as in OpenAI's API

_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of one thing, the first for templates


class ChatTemplate:
    """The chat template of a model file, or another given in its place.

    Parameters
    ----------
    tokenizer : Tokenizer
    metadata : dict
        Of the file: ``tokenizer.chat_template``, and ``tokenizer.chat_template.tool_use`` for messages with tools.
    name : str
        Of the file, for errors.
    source : str, optional
        A template in place of the file's.

    Raises
    ------
    TemplateError
        The file has no template, and none was given.
    """

    def __init__(self, tokenizer: Tokenizer, metadata: Mapping[str, Any], name: str, source: str | None = None):
        self.tokenizer, self.name = tokenizer, name
        self._sources = {"": source} if source is not None else _file_templates(metadata)
        if not self._sources:
            raise TemplateError(f"{name}: there is no tokenizer.chat_template; {_REMEDY}")

    @classmethod
    def of(cls, model: Any, source: str | None = None) -> ChatTemplate:
        """Template of a loaded `model`, or `source` in its place; TemplateError if there is none."""
        return cls(model.tokenizer, model.file.metadata, model.file.name, source)

    def render(self, messages: Sequence[Message], **options: Any) -> str:
        """Return the prompt as text, BOS included if the template writes it; parameters as of :meth:`encode`.

        For people to read: in the text, control tokens and the same characters from a user look alike.
        """
        return unmark(self._render(messages, **options))

    def encode(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """Return the ids of the prompt, BOS exactly once.

        Control tokens that the template writes are read as such; those in the messages stay text.

        Parameters
        ----------
        messages : sequence of dict
            Each with ``role`` and usually ``content`` (text, None, or a list of parts as the template expects).
        add_generation_prompt : bool
            End with the opening of the answer. Default true.
        tools : list of dict, optional
            Descriptions of functions, as JSON schemas.
        enable_thinking : bool, optional
            Passed on to templates that ask for it (also as ``thinking``).
        **options
            Further variables of the template.

        Returns
        -------
        list of int

        Raises
        ------
        TemplateError
            The template fails; the message says why and what else can be done.
        ParameterError
            `messages` are none.
        """
        return self.tokenizer.encode_marked(self._render(messages, **options))

    def _render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        enable_thinking: bool | None = None,
        **variables: Any,
    ) -> str:
        if enable_thinking is not None:
            variables = {"enable_thinking": enable_thinking, "thinking": enable_thinking} | variables
        source = self._sources.get("tool_use" if tools else "", next(iter(self._sources.values())))
        data = self._mark({"messages": [_checked(m, i) for i, m in enumerate(_listed(messages))], "tools": tools})
        data |= {"documents": None, "add_generation_prompt": add_generation_prompt} | self._special_texts() | variables
        try:
            return render(source, data)
        except TemplateError as e:
            raise TemplateError(f"{self.name}: {e}; {_REMEDY}") from e

    def _special_texts(self) -> dict[str, str]:
        t = self.tokenizer
        ids = {"bos_token": t.bos_id, "eos_token": t.eos_id, "pad_token": t.pad_id}
        return {name: t.vocab.tokens[i] for name, i in ids.items() if i is not None}

    def _mark(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.tokenizer.mark(value)
        if isinstance(value, Mapping):
            return {key: self._mark(v) for key, v in value.items()}
        return [self._mark(v) for v in value] if isinstance(value, list | tuple) else value


_REMEDY = "give a template (--template FILE), or a prompt without one (--raw)"


def _file_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    key = "tokenizer.chat_template"
    found = {"": metadata.get(key), "tool_use": metadata.get(f"{key}.tool_use")}
    return {name: source for name, source in found.items() if isinstance(source, str)}


def _listed(messages: Sequence[Message]) -> Sequence[Message]:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise ParameterError(f"messages are of type {type(messages).__name__}, expected a list of dictionaries")
    if not messages:
        raise ParameterError("there are no messages, expected at least one")
    return messages


def _checked(message: Message, i: int) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ParameterError(f"message {i} is of type {type(message).__name__}, expected a dictionary with a role")
    if not isinstance(message.get("role"), str):
        raise ParameterError(f"message {i} has role {message.get('role')!r}, expected a text such as 'user'")
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    if reasoning is None:
        return dict(message)
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


class Session:
    """A model with a conversation in its cache: each answer computes only what the last one did not.

    Parameters
    ----------
    model : Model
        Reset by the first answer; not to be used otherwise between answers.
    template : str, optional
        In place of the file's own.

    Attributes
    ----------
    tokens : list of int
        What the cache holds.
    """

    def __init__(self, model: Any, template: str | None = None):
        self.model, self.template = model, ChatTemplate.of(model, template)
        self.tokens: list[int] = []

    def stream(
        self, messages: Sequence[Message], *, template_options: Mapping[str, Any] | None = None, **parameters: Any
    ) -> Generator[Chunk, None, None]:
        """Answer `messages`, chunk by chunk.

        Parameters
        ----------
        messages : sequence of dict
            The whole conversation.
        template_options : dict, optional
            Keyword arguments of :meth:`ChatTemplate.encode`: `tools`, `enable_thinking`, ...
        **parameters
            As of :func:`tmla.generate.stream_generate`.

        Raises
        ------
        TemplateError, ContextError, ParameterError
            By this call, before any work.
        """
        ids = self.template.encode(messages, **(template_options or {}))
        n_same = 0
        while n_same < min(len(ids) - 1, len(self.tokens)) and ids[n_same] == self.tokens[n_same]:
            n_same += 1
        self.model.rewind(min(n_same, self.model.n_past))
        self.tokens = self.tokens[: self.model.n_past]
        new = ids[len(self.tokens) :]
        log.debug("prompt of %d tokens: %d are in the cache, %d are read", len(ids), len(self.tokens), len(new))
        chunks = stream_generate(self.model, new, keep=True, history=list(self.tokens), **parameters)
        return self._follow(chunks, ids)

    def _follow(self, chunks: Generator[Chunk, None, None], ids: list[int]) -> Generator[Chunk, None, None]:
        said = list(ids)
        try:
            for chunk in chunks:
                said += [] if chunk.token is None else [chunk.token]
                yield chunk
        finally:
            chunks.close()
            self.tokens = said[: self.model.n_past]


def stream_chat(
    model: Any,
    messages: Sequence[Message],
    *,
    template: str | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    enable_thinking: bool | None = None,
    template_options: Mapping[str, Any] | None = None,
    **parameters: Any,
) -> Generator[Chunk, None, None]:
    """Answer a conversation, chunk by chunk; parameters and errors as of :func:`chat`."""
    options = {"tools": tools, "enable_thinking": enable_thinking} | dict(template_options or {})
    ids = ChatTemplate.of(model, template).encode(messages, **options)
    return stream_generate(model, ids, **parameters)


def chat(model: Any, messages: Sequence[Message], **parameters: Any) -> str:
    """Answer a conversation with the file's own chat template.

    Parameters
    ----------
    model : Model
    messages : sequence of dict
        ``[{"role": "user", "content": "..."}, ...]``
    template : str, optional
        A jinja2 template in place of the file's.
    tools, enable_thinking, template_options
        As of :meth:`ChatTemplate.encode`.
    **parameters
        As of :func:`tmla.generate.stream_generate`: `max_tokens`, `temperature`, `stop`, ...

    Returns
    -------
    str
        The answer.

    Raises
    ------
    TemplateError
        The file has no template, or it fails; never another one in its place.
    ContextError, ParameterError, NumericsError
        As :func:`tmla.generate.stream_generate`.
    """
    return "".join(chunk.text for chunk in stream_chat(model, messages, **parameters))
