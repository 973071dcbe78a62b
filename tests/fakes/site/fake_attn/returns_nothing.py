import attnmux.plugin as amx

attnmux_contract = "1.0"


@amx.hookimpl
def attnmux_orders():
    amx.Insertion("fake_good", "forgot to yield it")
