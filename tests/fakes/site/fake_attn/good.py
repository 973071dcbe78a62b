import attnmux.plugin as amx

attnmux_contract = "1.0"


@amx.hookimpl
def attnmux_backends():
    yield amx.BackendInfo(
        name="fake_good",
        summary="a third party's backend",
        implementation="fake_attn.code:GoodBackend",
        claims=(amx.Claim(device=amx.DeviceSet("cpu"), head_size=amx.ANY, dtype=amx.ANY, page_size=amx.ANY),),
    )
    yield amx.BackendInfo(
        name="fake_unloadable",
        summary="its module fails to import",
        implementation="fake_attn.code_that_fails:Backend",
        claims=(amx.Claim(device=amx.DeviceSet("cpu"), head_size=amx.ANY, dtype=amx.ANY, page_size=amx.ANY),),
    )


@amx.hookimpl
def attnmux_compositions():
    yield amx.Composition("fake_mix", (("prefill", "fake_good"), ("decode", "fake_unloadable")))


@amx.hookimpl
def attnmux_orders():
    yield amx.Insertion("fake_good", "a reason of its own", before="*", when=amx.when("cpu", row_class="decode"))


@amx.hookimpl
def attnmux_health_checks():
    yield amx.HealthCheck("fake license", lambda: [amx.Finding("ok", "valid")])
