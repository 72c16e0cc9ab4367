"""Our wrappers inside other trainers; each module needs the package that it is named after."""

__all__: list[str] = []
