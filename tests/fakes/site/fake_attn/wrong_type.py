import attnmux.plugin as amx

attnmux_contract = "1.0"


@amx.hookimpl
def attnmux_backends():
    return ["a name is no declaration"]
