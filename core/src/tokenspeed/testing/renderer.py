"""What every renderer has to pass. A plugin subclasses the suite and names its renderer::

class TestMine(RendererSuite):
    def make(self) -> Renderer:
        return MyRenderer(RendererContext())
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import Any

import pytest

from tokenspeed.errors import RequestError
from tokenspeed.interfaces.renderer import Renderer

__all__ = ["RendererSuite"]

_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"What {name} does: ünïcode and <tags>.",
            "parameters": {"type": "object", "properties": {"place": {"type": "string", "description": "A pläce."}}},
        },
    }
    for name in ("get_weather", "get_time")
]


def _call(number: int, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


_TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be bríef."},
    {"role": "user", "content": "First question?"},
    {"role": "assistant", "content": "First answer.", "reasoning_content": "Old thought."},
    {"role": "user", "content": "Weather and time in Zürich?"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "New thought.",
        "tool_calls": [_call(1, "get_weather", {"place": "Zürich"}), _call(2, "get_time", {"place": "Zürich"})],
    },
    {"role": "tool", "tool_call_id": "call_2", "content": "noon"},
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
]


class RendererSuite(ABC):
    """Behaviour that servers and users rely on, whatever the format."""

    @abstractmethod
    def make(self) -> Renderer:
        """A renderer as the server builds it."""

    def test_every_text_appears_and_in_order(self) -> None:
        """System, user and assistant texts, and what is said of the tools."""
        text = self.make().render(_TALK, tools=_TOOLS)
        places = [text.index(part) for part in ("Be bríef.", "First question?", "First answer.", "Weather and time")]
        assert places == sorted(places)
        for part in ("get_weather", "get_time", "ünïcode and <tags>", "A pläce."):
            assert part in text

    def test_calls_stand_before_their_results(self) -> None:
        """The model reads results as answers to what it asked for."""
        text = self.make().render(_TALK, tools=_TOOLS)
        asked = text.index("Weather and time")
        called = text.index("get_weather", asked)
        assert called < text.index("sunny", called)
        assert called < text.index("noon", called)

    def test_rendering_again_gives_the_same_and_changes_nothing(self) -> None:
        """The prefix cache lives from equal prompts; messages belong to the caller."""
        renderer, talk, tools = self.make(), copy.deepcopy(_TALK), copy.deepcopy(_TOOLS)
        assert renderer.render(talk, tools=tools) == renderer.render(talk, tools=tools)
        assert (talk, tools) == (_TALK, _TOOLS)

    def test_a_final_message_can_be_continued(self) -> None:
        """The prompt ends inside the last message."""
        text = self.make().render(
            [*_TALK[:2], {"role": "assistant", "content": "It is call"}],
            add_generation_prompt=False,
            continue_final_message=True,
        )
        assert text.endswith("It is call")

    def test_the_generation_prompt_only_adds_at_the_end(self) -> None:
        """Without it the prompt is a beginning of the one with it."""
        renderer = self.make()
        without = renderer.render(_TALK, tools=_TOOLS, add_generation_prompt=False)
        assert renderer.render(_TALK, tools=_TOOLS).startswith(without)

    def test_tools_can_be_given_without_a_system_message_and_the_other_way_round(self) -> None:
        """Neither needs the other."""
        assert "get_time" in self.make().render(_TALK[1:2], tools=_TOOLS)
        assert "get_time" not in self.make().render(_TALK[:2])

    def test_arguments_that_are_no_object_are_shown_as_written(self) -> None:
        """A call that was cut is in the history of a real conversation."""
        talk = copy.deepcopy(_TALK)
        talk[4]["tool_calls"][0]["function"]["arguments"] = '{"place": "Zür'
        assert '{"place": "Zür' in self.make().render(talk, tools=_TOOLS)

    def test_a_tool_message_that_answers_nothing_is_refused_by_its_place(self) -> None:
        """The message names its index."""
        with pytest.raises(RequestError, match=r"messages\[1\]"):
            self.make().render([_TALK[1], {"role": "tool", "content": "noon", "tool_call_id": "x"}])

    def test_a_keyword_that_means_nothing_is_refused(self) -> None:
        """Never dropped."""
        with pytest.raises(RequestError, match="nonsense"):
            self.make().render(_TALK, extra={"nonsense": True})
