"""What several ends of a connection do, a thread each."""

import threading


def at_once(made, each):
    """`each` of every key and value of `made`; the first error that one raises."""
    errors = []

    def call(mesh, transport):
        try:
            each(mesh, transport)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=item) for item in made.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
