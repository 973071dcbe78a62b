import attnmux.plugin as amx

attnmux_contract = "1.0"


@amx.hookimpl
def attnmux_backend():
    return ()
