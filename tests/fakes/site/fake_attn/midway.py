import attnmux.plugin as amx

attnmux_contract = "1.0"


@amx.hookimpl
def attnmux_compositions():
    yield amx.Composition("fake_half", (("decode", "fake_good"),))
    raise RuntimeError("half of it was declared")
