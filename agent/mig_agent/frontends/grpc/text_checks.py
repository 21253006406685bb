"""Checks every text of an incoming message, found by the message's descriptor: new fields are checked, too."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from mig_agent.core.texts import check_text


def check_texts(message: Message) -> None:
    """Raise UsageError for a text with control, bidirectional or invisible characters anywhere in a message.

    Fields that this version does not know are not checked; nothing uses them.
    """
    for name in _fields_with_texts(message.DESCRIPTOR):
        value = getattr(message, name)
        if isinstance(value, str):
            check_text(value, f"`{name}`", repeat=False)
        elif isinstance(value, Message):
            if message.HasField(name):
                check_texts(value)
        else:
            for each in value:
                if isinstance(each, str):
                    check_text(each, f"`{name}`", repeat=False)
                else:
                    check_texts(each)


def texts_within(message: Descriptor) -> Iterator[str]:
    """Yield the paths of all text fields in a message, such as `request.holder.name`."""
    for field in message.fields:
        if field.type == FieldDescriptor.TYPE_STRING:
            yield field.name
        elif field.message_type is not None:
            yield from (f"{field.name}.{each}" for each in texts_within(field.message_type))


@cache
def _fields_with_texts(message: Descriptor) -> tuple[str, ...]:
    """Return the names of the fields that are a text or contain one at any depth; computed once per message type.

    Raises AssertionError for a map, which no request has yet: its values would need a check of their own.
    """
    for field in message.fields:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            raise AssertionError(f"cannot check the texts in {field.full_name}: it is a map")
    return tuple(dict.fromkeys(path.partition(".")[0] for path in texts_within(message)))
