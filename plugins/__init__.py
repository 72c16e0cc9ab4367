"""Use stepwrap in other trainers. Each module requires the package that it is named after."""

__all__: list[str] = []
