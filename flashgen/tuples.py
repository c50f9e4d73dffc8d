"""How what every call makes is made."""

from typing import Any

#: `new(Class, values)` is a NamedTuple of all its fields, in a third of the time that the class itself takes.
new: Any = tuple.__new__
