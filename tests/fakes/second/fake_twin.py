import attnmux.plugin as amx

attnmux_contract = "1.0"


@amx.hookimpl
def attnmux_backends():
    yield amx.BackendInfo(
        name="fake_twin",
        summary="from a plugin that shares its name with another",
        implementation=None,
        claims=(amx.Claim(device=amx.DeviceSet("cpu"), head_size=amx.ANY, dtype=amx.ANY, page_size=amx.ANY),),
    )
