"""Renders the chat templates with `transformers` and stores the prompts beside them.

``python -m tests.data.make_template_reference`` from the top folder; needs transformers.
"""

import json
import pathlib

import transformers
from tokenizers import Tokenizer, models

from tests.chat_cases import CASES

FOLDER = pathlib.Path(__file__).parent / "templates"


def prompt_of(source, messages, options):
    """Prompt as `transformers` renders it, None where it fails."""
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"x": 0}, unk_token="x")),
        bos_token="<｜begin▁of▁sentence｜>",
        eos_token="<｜end▁of▁sentence｜>",
    )
    options = {"add_generation_prompt": True} | options
    if "enable_thinking" in options:
        options["thinking"] = options["enable_thinking"]
    try:
        return tokenizer.apply_chat_template(messages, chat_template=source, tokenize=False, **options)
    except Exception:  # whatever a template raises
        return None


def main():
    prompts = {
        path.stem: {name: prompt_of(path.read_text(encoding="utf-8"), *case) for name, case in CASES.items()}
        for path in sorted(FOLDER.glob("*.jinja"))
    }
    stored = {"transformers": transformers.__version__, "prompts": prompts}
    text = json.dumps(stored, ensure_ascii=False, indent=1)
    (FOLDER / "rendered.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
