"""Conversations that every chat template is tried on."""

CALL = {
    "id": "functions.weather:0",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Köln"}'},
}
CALL_DICT = {"id": "x1", "type": "function", "function": {"name": "add", "arguments": {"b": [1, None], "a": "é"}}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'Weather of a "city" <now>',
            "parameters": {"type": "object", "properties": {"city": {"type": "string", "default": None}}},
        },
    }
]


def say(*contents, system=None):
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    return [{"role": "system", "content": system}, *turns] if system else turns


TOOL_TURNS = [
    *say("Weather?", system="Be brief."),
    {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
    {"role": "tool", "tool_call_id": "functions.weather:0", "content": "rain & 9 °C"},
    {"role": "tool", "tool_call_id": "functions.weather:1", "content": "sun"},
]

CASES = {
    "1 turn": (say("Hello"), {}),
    "2 turns": (say("Hello", "Hi!", "Who are you?"), {}),
    "3 turns": (say("Hello", "Hi!", "Who?", " A model.\n", "  Spaces \n\n kept? "), {}),
    "ends with an answer": (say("Hello", "Hi!"), {"add_generation_prompt": False}),
    "system": (say("Hello", system="You are terse."), {}),
    "two systems": ([*say("Hello", system="One."), {"role": "system", "content": "Two."}], {}),
    "no opening": (say("Hello", "Hi!", "Bye"), {"add_generation_prompt": False}),
    "code": (say('<tag attr="x">\n\tif a < b && c: {{ x }} {% y %}\n```', "大海 🙂 é\r\n", "'\"\\n"), {}),
    "thought": (say("1+1?", "<think>\none plus one\n</think>\n\n2", "And 2+2?"), {}),
    "reasoning": ([*say("1+1?"), {"role": "assistant", "content": "2", "reasoning_content": "easy"}], {}),
    "reasoning by another name": ([*say("1+1?"), {"role": "assistant", "content": "2", "reasoning": "easy"}], {}),
    "thinking on": (say("Hello", "Hi!", "Why?"), {"enable_thinking": True}),
    "thinking off": (say("Hello", "Hi!", "Why?"), {"enable_thinking": False}),
    "tools": (say("Weather?"), {"tools": TOOLS}),
    "tool answers": (TOOL_TURNS, {"tools": TOOLS}),
    "after the tool": ([*TOOL_TURNS, {"role": "assistant", "content": "Take a coat."}, *say("Thanks")], {}),
    "call with content": (
        [*say("Add"), {"role": "assistant", "content": "Wait.", "tool_calls": [CALL_DICT]}],
        {"add_generation_prompt": False},
    ),
    "empty content": (say("", "", ""), {}),
    "None content": ([*say("Hello"), {"role": "assistant", "content": None}, *say("Well?")], {}),
    "None from a user": ([{"role": "user", "content": None}], {}),
    "None calls": ([*say("Hello"), {"role": "assistant", "content": "Hi", "tool_calls": None}], {}),
    "parts": ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], {}),
    "named": ([{"role": "user", "name": "Ada", "content": "Hello"}], {}),
    "unknown role": ([{"role": "critic", "content": "No."}, *say("Hello")], {}),
}
