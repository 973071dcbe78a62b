"""What the demo asks. Lengths differ on purpose: a step then holds decode rows and parts of long prompts together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnmux.dispatch.errors import complaint


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text, either a question for the model's chat template or the beginning of a text to go on with."""

    text: str
    chat: bool = True

    def encode(self, tokenizer: Any) -> list[int]:
        """Token ids."""
        if not self.chat:
            return [int(i) for i in tokenizer(self.text)["input_ids"]]
        message = [{"role": "user", "content": self.text}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        return [int(i) for i in tokenizer(text, add_special_tokens=False)["input_ids"]]


def read_prompts(file: Path) -> list[Prompt]:
    """One question a line; empty lines are skipped.

    Raises:
        ValueError: there is none.
        OSError: the file cannot be read.
    """
    prompts = [Prompt(line.strip()) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not prompts:
        raise ValueError(complaint("prompts", f"{file}, which has no text", "one prompt a line"))
    return prompts


_LIGHTHOUSE = """Here is a story.

The lighthouse at Crane Point had a keeper named Odile, who had been sent there for one winter and stayed for thirty years. Every \
evening she climbed the hundred and twelve steps with a can of oil, trimmed the wick, wound the clockwork that turned the lens, \
and wrote one line in the log: the weather, the ships, the state of the lamp. She never wrote about herself. The log filled forty \
volumes, and in all of them there was only one entry that did not follow the rule.

It was made in the ninth year, in the month of March. A fishing boat called the Marigold had gone out in a calm and been caught by \
a storm from the north. Odile saw its lantern at dusk, far too close to the reef, and she saw it go out. The light of the tower \
was burning well, but the fog had come down so thick that the beam ended in a white wall a few yards from the glass. She rang the \
bell until the rope cut her hands. Then she did what the regulations forbade: she left the lamp, took the small boat, and rowed \
toward the place where the lantern had been, steering by the sound of the water on the rocks.

She found three people holding on to a hatch cover: a man, his daughter, and a boy of twelve who had been hired that morning and \
could not swim. The boat could carry two besides the one who rowed. Odile took the girl and the boy, told the man to hold on and \
to sing as loudly as he could, and rowed back. It took most of an hour. She left the children by the stove and went out again, and \
she found the man by his voice, although by then it was hardly a voice at all. He had been singing the only song he could think \
of, which was a song for putting children to sleep.

When the four of them sat at last in the kitchen of the lighthouse, nobody spoke for a long time. The lamp had gone out while \
Odile was away, and no other ship had passed. In the morning the inspector came, because the harbour had reported the light dark \
for three hours. He was a careful man who had written most of the regulations himself. He asked her why she had left the lamp. \
Odile gave him the log. The entry said: "Fog. Light not seen by anyone tonight. Went out to be seen." The inspector read it twice. \
Then he took his own pen, and under her line he wrote the date and the words "lamp in good order", and he signed it.

The boy stayed. His name was Tobias, and he learned the lamp, the clockwork and the bell, and how to row in fog by the sound of \
the rocks. When Odile grew too old for the steps, he carried the oil, and she sat in the kitchen and listened to the clockwork \
above her. She said she could tell from its ticking whether the lens was clean. On her last evening she asked him to read to her \
from the log, anything he liked. He opened the ninth volume and read the month of March from the first day to the last, the \
weather, the ships, the state of the lamp. When he came to the one entry that did not follow the rule, he did not read it aloud, \
because he saw that she was already saying it to herself."""

_CODE = """def merge(left, right):
    result = []
    i = j = 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            result.append(left[i])
            i += 1
        else:
            result.append(right[j])
            j += 1
    return result + left[i:] + right[j:]


def merge_sort(values):"""

PROMPTS = (
    Prompt("Once upon a time", chat=False),
    Prompt("The three primary colours are", chat=False),
    Prompt("What is the capital of France?"),
    Prompt("Write a short poem about the sea."),
    Prompt(_CODE, chat=False),
    Prompt(
        "A train leaves at 9:40 and arrives at 12:05. It stops for ten minutes at each of two stations on the way. How long is it "
        "moving, in minutes? Explain every step of the calculation before giving the answer."
    ),
    Prompt(
        "Read this note and answer the question after it.\n\nA key-value cache holds, for every token a language model has read, one key "
        "and one value in each layer. A server that answers many people at once does not know how long each answer will become, so "
        "it cuts the cache into pages of equal size and gives a request a new page whenever its last one is full. A table says which "
        "pages belong to which request. When a request ends, its pages are free at once for another one, wherever they lie. Nothing "
        "is ever moved. Without pages the server would have to reserve room for the longest possible answer, and most of the memory "
        "would hold nothing.\n\nQuestion: why does the server cut the cache into pages?"
    ),
    Prompt(_LIGHTHOUSE + "\n\nWhat did Odile do in the ninth year, and why did the inspector forgive her?"),
)
