"""The public place of `tunix.sandbox.jail`."""

from tunix.sandbox.jail import PROTECTIONS, Finish, Jail, JailResult, JailSettings

__all__ = ["PROTECTIONS", "Finish", "Jail", "JailResult", "JailSettings"]
