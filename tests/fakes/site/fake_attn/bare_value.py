import attnmux.plugin as amx

attnmux_contract = "1.0"


@amx.hookimpl
def attnmux_backends():
    yield amx.BackendInfo(
        name="fake_bare",
        summary="a claim with a value where a constraint belongs",
        implementation=None,
        claims=(amx.Claim(device=amx.DeviceSet("cpu"), head_size=128, dtype=amx.ANY, page_size=amx.ANY),),
    )
