"""A data set that tells all it knows: what a job with secrets must bear."""

import hashlib
import os


class Tells:
    """Prints its secret, and raises with it in the message, beside what proves that it had it."""

    def __init__(self) -> None:
        secret = os.environ["TELLING_SECRET"]
        print(f"the secret is {secret}", flush=True)
        digest = hashlib.sha256(secret.encode()).hexdigest()
        raise RuntimeError(f"told {secret} with digest {digest} and home {os.environ['TELLING_HOME']}")
