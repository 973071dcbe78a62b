from fake_plugins import TinyBackend


class GoodBackend(TinyBackend):
    pass
