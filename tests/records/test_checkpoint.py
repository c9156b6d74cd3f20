"""What a checkpoint refuses."""

import json

import numpy as np
import pytest

from headstart.core.message import Message
from headstart.errors import HeadstartError
from headstart.records import Checkpoint


def test_a_checkpoint_of_an_earlier_format_is_refused_with_what_to_do() -> None:
    now = Checkpoint({"stage": 1, "round": 0}).to_message()
    assert Checkpoint.from_message(now).progress == {"stage": 1, "round": 0}
    before = Message({"progress": np.frombuffer(json.dumps({"stage": 1, "round": 0}).encode(), np.uint8)})
    with pytest.raises(HeadstartError, match="an earlier headstart; continue it there, or start again"):
        Checkpoint.from_message(before)
