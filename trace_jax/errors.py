"""The one exception a user can cause and mend."""


class UserError(Exception):
    """A mistake in the user's input: a config key, a path, a file.

    The message is one line that says what is wrong, where, and what to write instead. The command line prints it
    without a traceback and exits with code 2.
    """
