"""Every error a user of tmla can cause. Messages say where, what was found, what was expected, what to do."""


class TmlaError(Exception):
    """Base class: ``except tmla.TmlaError`` catches all that the package raises on purpose."""


class GGUFError(TmlaError):
    """The file cannot be used: damaged, incomplete, of a kind or type that tmla does not run."""


class BackendError(TmlaError):
    """The wanted Taichi backend is not available, or cannot hold what was asked for."""


class ContextError(TmlaError):
    """More positions were asked for than the cache holds, or a position that is not there."""


class NumericsError(TmlaError):
    """Logits are not finite; the message names the position and the first layer at fault."""


class StateError(TmlaError):
    """A saved state cannot be used: cut, damaged, of another model; or it cannot be written."""


class ParameterError(TmlaError, ValueError):
    """An argument is out of its range or of the wrong kind; nothing was done."""


class TemplateError(TmlaError):
    """The chat template failed, ran too long, or did what a template must not do."""
