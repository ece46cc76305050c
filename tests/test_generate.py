"""Generation with a model made of a script: reasons, stops, context, padding, state of the cache."""

import itertools
import types

import numpy as np
import pytest

from tests.vocabularies import bpe, spm
from tmla.errors import ContextError, NumericsError, ParameterError
from tmla.generate import StopScanner, generate, stream_generate

EOS = 260


class FakeModel:
    """Follows the API of a model. The logits behind n positions favour ``script[n - n_prompt]``, then ``a``."""

    def __init__(self, script=(), tokenizer=None, n_ctx=64, n_padding=8):
        self.tokenizer = bpe() if tokenizer is None else tokenizer
        self.n_ctx, self.fed, self.script, self.n_prompt = n_ctx, [], list(script), None
        self.config = types.SimpleNamespace(n_vocab=self.tokenizer.n_vocab + n_padding)
        self.resets = self.steps = 0

    @property
    def n_past(self):
        return len(self.fed)

    def _logits(self):
        i = self.n_past - self.n_prompt
        x = np.zeros(self.config.n_vocab, np.float32)
        x[ord("a") if i >= len(self.script) else self.script[i]] = 10.0
        return x

    def prefill(self, tokens, all_logits=False):
        assert tokens
        assert self.n_past + len(tokens) <= self.n_ctx
        self.fed += tokens
        self.n_prompt = self.n_past
        return self._logits()

    def decode(self, token):
        assert self.n_past < self.n_ctx
        self.fed.append(token)
        self.steps += 1
        return self._logits()

    def reset(self):
        self.fed, self.resets = [], self.resets + 1

    def rewind(self, n_past):
        assert 0 <= n_past <= self.n_past
        del self.fed[n_past:]


class GreedyModel(FakeModel):
    """The same with a device that chooses by itself, padding and banned tokens included."""

    calls = 0

    def decode_greedy(self, token, n):
        assert self.n_past + n <= self.n_ctx
        self.calls += 1
        out = []
        for _ in range(n):
            token = int(self.decode(token).argmax())
            out.append(token)
        return out


@pytest.fixture(params=[FakeModel, GreedyModel])
def make(request):
    return request.param


def ids_of(text, tokenizer=None):
    return (tokenizer or bpe()).encode(text, add_bos=False)


def run(model, prompt="the", **parameters):
    chunks = list(stream_generate(model, prompt, **parameters))
    assert all(c.reason is None and c.stats is None for c in chunks[:-1])
    assert chunks[-1].reason
    return "".join(c.text for c in chunks), [c.token for c in chunks], chunks[-1]


def test_length(make):
    model = make(ids_of("hello world, hello"))
    text, tokens, last = run(model, max_tokens=5)
    assert (text, tokens, last.reason) == ("hello", ids_of("hello"), "length")
    assert model.fed == [259, 257, *tokens[:-1]]  # the last token is shown, not fed
    assert (last.stats.prompt_tokens, last.stats.n_tokens, last.stats.n_steps) == (2, 5, 4)
    assert last.stats.prompt_s >= 0
    assert last.stats.decode_s > 0
    assert last.stats.decode_tok_s > 0


def test_eos(make):
    model = make([*ids_of("hi"), EOS, *ids_of("never")])
    text, tokens, last = run(model)
    assert (text, tokens[-1], last.reason, last.stats.n_tokens) == ("hi", EOS, "eos", 3)
    assert model.fed == [259, 257, *ids_of("hi")]


def test_ignore_eos(make):
    text, tokens, last = run(make([*ids_of("hi"), EOS, *ids_of("on")]), max_tokens=5, ignore_eos=True)
    assert EOS not in tokens
    assert (text[:2], text[3:], last.reason) == ("hi", "on", "length")


@pytest.mark.parametrize(
    ("stop", "shown"),
    [
        ("lo wor", "hel"),
        (["xyz", "wor", "o w"], "hell"),
        (["hello world"], ""),
        ("!", "hello world"),
        (["d!", "d"], "hello worl"),
        (["worry", "rld", "ld"], "hello wo"),
        ("absent", "hello world!"),
    ],
)
def test_stop_strings_span_tokens(make, stop, shown):
    model = make([*ids_of("hello world!"), EOS])
    chunks = list(stream_generate(model, "the", stop=stop))
    assert "".join(c.text for c in chunks) == shown
    assert chunks[-1].reason == ("eos" if stop == "absent" else "stop")


def test_text_that_may_begin_a_stop_is_held_back():
    chunks = list(stream_generate(FakeModel([*ids_of("a<|b<|c"), EOS]), "the", stop="<|end|>"))
    assert [c.text for c in chunks] == ["a", "", "", "<|b", "", "", "<|c", ""]
    text, _, last = run(FakeModel([*ids_of("a<|"), EOS]), stop="<|end|>")
    assert (text, last.reason) == ("a<|", "eos")  # nothing that was held is lost
    text, _, last = run(FakeModel(ids_of("a<|b")), stop="<|end|>", max_tokens=3)
    assert (text, last.reason) == ("a<|", "length")


def test_half_a_character(make):
    text, _, last = run(make([*ids_of("é🙂")[:-1], EOS]))
    assert (text, last.reason) == ("é\ufffd", "eos")
    for chunk in stream_generate(make([*ids_of("é🙂大"), EOS]), "the"):
        assert "\ufffd" not in chunk.text


def test_context_fills_up(make):
    model = make(n_ctx=10)
    text, tokens, last = run(model, "the", max_tokens=None)
    assert (last.reason, len(tokens), text, model.n_past) == ("context", 9, "a" * 9, 10)
    model = make(n_ctx=2)  # the prompt alone fills it: its logits still give a token
    assert run(model, "the")[1:2] == ([ord("a")],)
    assert run(make(n_ctx=2), "the")[2].reason == "context"
    assert run(make(n_ctx=10), "the", max_tokens=9)[2].reason == "length"


def test_prompt_that_does_not_fit_is_refused_before_any_work():
    model = FakeModel(n_ctx=4)
    model.fed = [1, 2]
    with pytest.raises(ContextError, match=r"the prompt has 5 tokens, but the context holds 4"):
        stream_generate(model, [1, 2, 3, 4, 5])
    with pytest.raises(ContextError, match=r"3 tokens after 2 in the cache.*n_ctx=5"):
        stream_generate(model, [1, 2, 3], keep=True)
    assert (model.fed, model.resets) == ([1, 2], 0)


@pytest.mark.parametrize(
    ("prompt", "parameters", "message"),
    [
        ([], {}, "no tokens"),
        ([272], {}, "token id 272, expected 0 to 271"),
        ([-1], {}, "token id -1"),
        (["a"], {}, "expected text or a list of ids"),
        ([1.5], {}, "expected text or a list"),
        (7, {}, "the prompt is of type int"),
        ([1], {"max_tokens": -1}, "max_tokens is -1"),
        ([1], {"max_tokens": 1.5}, "max_tokens"),
        ([1], {"stop": ""}, "stop string"),
        ([1], {"stop": ["a", ""]}, "stop string"),
        ([1], {"temperature": -1}, "temperature"),
        ([1], {"top_q": 1}, "top_q"),
    ],
)
def test_refused(prompt, parameters, message):
    model = FakeModel()
    model.fed = [5]
    with pytest.raises(ParameterError, match=message):
        stream_generate(model, prompt, **parameters)
    assert (model.fed, model.resets) == ([5], 0)


def test_empty_text_is_bos_alone():
    assert run(FakeModel(ids_of("x")), "", max_tokens=1)[0] == "x"
    with pytest.raises(ParameterError, match="no tokens"):
        stream_generate(FakeModel(tokenizer=bpe(add_bos_token=False)), "")


def test_no_tokens_wanted():
    model = FakeModel()
    text, tokens, last = run(model, max_tokens=0)
    assert (text, tokens, last.reason, model.n_past) == ("", [None], "length", 2)


def test_padding_and_unused_ids_are_never_chosen(make):
    """270 is beyond the tokenizer's list, 262 the padding token, 263 unused."""
    for bad in (270, 262, 263):
        script = [*ids_of("one"), bad, *ids_of("two"), bad, bad, EOS]
        for parameters in ({}, {"temperature": 0.7, "seed": 0}):
            _, tokens, _ = run(make(script), max_tokens=12, **parameters)
            assert not {270, 262, 263} & set(tokens)
        text, tokens, last = run(make(script))
        assert (text[:3], text[4:7], len(tokens), last.reason) == ("one", "two", 10, "eos")


def test_prompt_ids_are_fed_as_they_are():
    model = FakeModel()
    run(model, np.array([5, 6, 270]), max_tokens=1)
    assert model.fed == [5, 6, 270]
    run(model, "<bos>the", max_tokens=1, special=True)
    assert model.fed == [259, 257]
    run(model, "<bos>", max_tokens=1)
    assert model.fed == [259, *ids_of("<bos>")]


def test_keep(make):
    model = make([*ids_of("hi"), EOS])
    run(model, "the")
    before = list(model.fed)
    run(model, " the", keep=True, max_tokens=1)
    assert model.resets == 1
    assert model.fed == [*before, *ids_of(" the")]  # no second BOS


def test_closing_early_leaves_a_sound_cache(make):
    for n_shown in range(1, 30):
        model = make(ids_of("abcdefghijklmnopqrstuvwxyz" * 2))
        stream = stream_generate(model, "the", max_tokens=50)
        shown = [c.token for c in itertools.islice(stream, n_shown)]
        stream.close()
        assert model.fed == [259, 257, *shown[:-1]]


def test_interrupt_in_a_step():
    model = FakeModel(ids_of("abcdef"))
    stream = stream_generate(model, "the")
    next(stream)

    def interrupt(token):
        raise KeyboardInterrupt

    model.decode = interrupt
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    assert model.fed == [259, 257]


def test_device_choice_is_used_only_where_it_is_the_same():
    script = [*ids_of("hello there, this is some text"), EOS]
    plain = run(FakeModel(script))
    for parameters, used in [({}, True), ({"temperature": 0.5, "seed": 0}, False), ({"repeat_penalty": 1.01}, False)]:
        model = GreedyModel(script)
        text, tokens, _ = run(model, **parameters)
        assert (text, tokens) == plain[:2]
        assert bool(model.calls) == used


def test_not_a_number():
    model = FakeModel()
    model.decode = lambda token: np.full(272, np.nan, np.float32)
    stream = stream_generate(model, "the")
    next(stream)
    with pytest.raises(NumericsError):
        next(stream)


def test_penalties_see_prompt_and_history():
    model = FakeModel([40, 40, 40])
    _, tokens, _ = run(model, [40, 41], max_tokens=3, frequency_penalty=11.0)
    assert 40 not in tokens
    model.fed = [7] * 3
    _, tokens, _ = run(model, [41], max_tokens=1, keep=True, history=[40], frequency_penalty=11.0)
    assert tokens[0] != 40


def test_generate_joins():
    assert generate(FakeModel([*ids_of("hello"), EOS]), "the") == "hello"
    assert generate(FakeModel([*ids_of("hello"), EOS]), "the", stop="l") == "he"


def test_control_tokens_in_the_output():
    script = [*ids_of("x"), 259, *ids_of("y"), EOS]
    assert run(FakeModel(script))[0] == "xy"
    assert run(FakeModel(script), skip_special=False)[0] == "x<bos>y"


def test_sentencepiece_keeps_the_space_between_prompt_and_text():
    tokenizer = spm()
    model = FakeModel([266, 2], tokenizer=tokenizer)
    assert run(model, "a")[0] == " ab"


def test_without_a_tokenizer():
    model = FakeModel([40, 41])
    model.tokenizer = None
    text, tokens, last = run(model, [1, 2], max_tokens=2)
    assert (text, tokens, last.reason) == ("", [40, 41], "length")
    with pytest.raises(ParameterError, match="no tokenizer"):
        stream_generate(model, "the")


def test_stop_scanner_is_independent_of_how_text_is_cut(rng):
    """Whatever the pieces, what is shown is the text up to the first stop that completes."""
    for _ in range(500):
        text = "".join(rng.choice(list("abc"), rng.integers(1, 25)))
        stops = ["".join(rng.choice(list("abc"), rng.integers(1, 5))) for _ in range(rng.integers(0, 3))]
        by_character = StopScanner(stops)
        expected = "".join(map(by_character.push, text)) + by_character.flush()
        ends = [i + len(s) for s in stops if (i := text.find(s)) >= 0]
        assert by_character.stopped == bool(ends)
        if ends:
            assert expected == min(
                (text[: min(ends)][: -len(s)] for s in stops if text[: min(ends)].endswith(s)), key=len
            )
        else:
            assert expected == text
        scanner, shown, i = StopScanner(stops), "", 0
        while i < len(text):
            n = int(rng.integers(1, 4))
            shown += scanner.push(text[i : i + n])
            i += n
            assert text.startswith(shown)
        assert len(shown + scanner.flush()) >= len(shown)
        assert scanner.stopped == by_character.stopped
