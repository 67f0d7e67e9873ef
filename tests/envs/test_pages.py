"""Pages from real servers on this machine, which the reader must be allowed, name by name, to reach at all."""

from __future__ import annotations

import gzip
import pickle
import ssl
import sys
import time
import zlib
from collections.abc import Sequence

import pytest
import trustme

from envs.errors import UserError
from envs.retrieval.pages import PageError, PageReader, Resolve, is_public, text_of_html
from tests.envs.servers import Asked, Reply, html_reply, serving

LOCAL = ["127.0.0.1/32"]
ARTICLE = """<html><head><title>Vistula</title><script>var menu = 1</script></head><body>
<nav><a href="/">Home</a> <a href="/shop">Shop now</a></nav><article><h1>The Vistula</h1>
<p>The Vistula is the longest river in Poland, and it flows through Kraków and Warsaw.</p>
<p>It rises at Barania Góra in the south and empties into the Baltic Sea near Gdańsk.</p></article>
<footer>Cookie settings. All rights reserved.</footer></body></html>"""


def names(**addresses: Sequence[str]) -> Resolve:
    """A resolver that knows these names, dots written as __."""
    known = {name.replace("__", "."): found for name, found in addresses.items()}

    def resolve(host: str, port: int) -> Sequence[str]:
        if host not in known:
            raise OSError("no such name")
        return known[host]

    return resolve


def test_the_text_of_a_page_without_its_menus() -> None:
    with serving(lambda asked: html_reply(ARTICLE)) as server:
        text = PageReader(allowed_networks=LOCAL).read(f"{server.url}/rivers?id=1")
    assert "longest river in Poland, and it flows through Kraków and Warsaw." in text
    assert "Baltic Sea near Gdańsk" in text
    assert "Shop now" not in text and "var menu" not in text and "<p>" not in text
    (asked,) = server.asked
    assert (asked.method, asked.path, asked.query) == ("GET", "/rivers", {"id": "1"})
    assert asked.headers["host"] == f"127.0.0.1:{server.port}" and "cookie" not in asked.headers


def test_how_the_page_is_coded_is_told_by_the_server_or_the_page() -> None:
    latin = ARTICLE.replace("ń", "n").encode("latin-1")

    def answer(asked: Asked) -> Reply:
        said = {"/said": "text/html; charset=ISO-8859-1", "/odd": "text/html; charset=none-such"}
        if asked.path == "/plain":
            return Reply(200, "Größe".encode(), {"Content-Type": "text/plain"})
        if asked.path == "/odd":
            return Reply(200, ARTICLE.encode(), {"Content-Type": said["/odd"]})
        return Reply(200, latin, {"Content-Type": said["/said"]})

    reader = PageReader(allowed_networks=LOCAL)
    with serving(answer) as server:
        assert "Kraków" in reader.read(server.url + "/said")
        assert "Gdańsk" in reader.read(server.url + "/odd")
        assert reader.read(server.url + "/plain") == "Größe"


@pytest.mark.parametrize(
    "address",
    """127.0.0.1 127.8.9.1 10.0.0.1 172.16.0.1 172.31.255.255 192.168.1.1 169.254.169.254 0.0.0.0 100.64.0.1
    192.0.2.1 198.18.0.1 224.0.0.1 239.255.255.250 240.0.0.1 255.255.255.255 ::1 :: fe80::1 fe80::1%eth0 fc00::1
    fd12:3456::1 fec0::1 ff02::1 2001:db8::1 ::ffff:127.0.0.1 ::ffff:10.0.0.1 64:ff9b::7f00:1 2002:7f00:1::
    ::127.0.0.1 ::ffff:0:7f00:1 64:ff9b:1::7f00:1 2606:4700::5efe:7f00:1 2606:4700::200:5efe:a00:1 3fff::1 100::1
    192.88.99.1 192.0.0.1 0.1.2.3 ::ffff:100.64.0.1
    2001:0:7f00:1::""".split(),  # noqa: SIM905
)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "172.32.0.1", "100.128.0.1", "2606:4700::1111", "::ffff:8.8.8.8"]
)
def test_addresses_that_are_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "localhost",
        "2130706433",
        "0x7f000001",
        "127.1",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "[0:0:0:0:0:ffff:127.0.0.1]",
        "[::]",
        "0.0.0.0",
        "0",
        "0x7f.1",
        "017700000001",
        "0177.0.0.1",
        "①②⑦.⓪.⓪.①",
        "127.0.0.1.",
        "localhost.",
        "user:word@127.0.0.1",
        "8.8.8.8\\@127.0.0.1",
        "127.0.0.1%00.example",
    ],
)
def test_this_machine_is_never_reached_however_it_is_written(host: str) -> None:
    with serving(lambda asked: html_reply(ARTICLE), host="0.0.0.0") as server:
        with pytest.raises(PageError):
            PageReader().read(f"http://{host}:{server.port}/")
        assert server.asked == []


def test_a_name_is_refused_when_any_of_its_addresses_is_local() -> None:
    with serving(lambda asked: html_reply(ARTICLE)) as server:
        for addresses in (["127.0.0.1"], ["8.8.8.8", "127.0.0.1"], ["169.254.169.254"], ["::1"]):
            reader = PageReader(resolve=names(page__test=addresses))
            with pytest.raises(PageError, match=r"host page\.test is refused: .* address is not public"):
                reader.read(f"http://page.test:{server.port}/")
        with pytest.raises(PageError, match="refused: no address"):
            PageReader(resolve=names(page__test=[])).read("http://page.test/")
        with pytest.raises(PageError, match=r"host other\.test is not known \(no such name\)"):
            PageReader(resolve=names()).read("http://other.test/")
        assert server.asked == []


def test_the_connection_goes_to_the_address_that_was_checked() -> None:
    """The name server gives another answer to a second question; there must be none."""
    answers = iter([["127.0.0.1"], ["10.0.0.1"]])
    with serving(lambda asked: html_reply(ARTICLE)) as server:
        reader = PageReader(allowed_networks=LOCAL, resolve=lambda host, port: next(answers))
        assert "Vistula" in reader.read(f"http://page.test:{server.port}/")
        assert server.asked[0].headers["host"] == f"page.test:{server.port}"
        with pytest.raises(PageError, match=r"10\.0\.0\.1 address is not public"):
            reader.read(f"http://page.test:{server.port}/")


def test_a_dead_address_is_followed_by_the_next() -> None:
    with serving(lambda asked: html_reply(ARTICLE)) as server:
        reader = PageReader(
            allowed_networks=["127.0.0.0/8"], resolve=names(page__test=["127.0.0.2", "127.0.0.1"])
        )
        assert "Vistula" in reader.read(f"http://page.test:{server.port}/")
        with pytest.raises(PageError, match="not reached, ConnectError"):
            PageReader(allowed_networks=["127.0.0.0/8"], resolve=names(page__test=["127.0.0.2"])).read(
                f"http://page.test:{server.port}/"
            )


def test_redirects_are_followed_and_checked_each() -> None:
    place: dict[str, str] = {}

    def answer(asked: Asked) -> Reply:
        if asked.path == "/page":
            return html_reply(ARTICLE)
        if asked.path == "/first":
            return Reply(301, b"x" * 100_000, {"Location": "/second", "Set-Cookie": "seen=1"})
        if asked.path == "/second":
            return Reply(302, b"", {"Location": "page"})
        if asked.path == "/loop":
            return Reply(302, b"", {"Location": "/loop"})
        return Reply(307, b"", place)

    reader = PageReader(allowed_networks=LOCAL)
    with serving(answer) as server, serving(lambda asked: html_reply(ARTICLE), host="127.0.0.2") as hidden:
        assert "Vistula" in reader.read(server.url + "/first")
        assert [asked.path for asked in server.asked] == ["/first", "/second", "/page"]
        with pytest.raises(PageError, match="more than 5 redirects"):
            reader.read(server.url + "/loop")
        for location, reason in (
            (hidden.url + "/page", r"host 127\.0\.0\.2 is refused"),
            ("http://169.254.169.254/latest/meta-data", r"host 169\.254\.169\.254 is refused"),
            ("file:///etc/passwd", "no http address"),
            ("gopher://127.0.0.1/", "no http address"),
            ("http://", "no http address|not reached"),
        ):
            place["Location"] = location
            with pytest.raises(PageError, match=reason):
                reader.read(server.url + "/elsewhere")
        assert hidden.asked == []


def test_certificates_are_those_of_the_name_not_of_the_address() -> None:
    authority = trustme.CA()
    ours, theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("page.test").configure_cert(ours)
    authority.issue_cert("other.test").configure_cert(theirs)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    asked_for: list[str | None] = []
    ours.sni_callback = lambda connection, name, context: asked_for.append(name)
    reader = PageReader(
        allowed_networks=LOCAL, resolve=names(page__test=["127.0.0.1"]), verify=trusting, timeout=5
    )
    with serving(lambda asked: html_reply(ARTICLE), tls=ours) as server:
        assert "Vistula" in reader.read(f"https://page.test:{server.port}/")
        assert asked_for == ["page.test"]
        distrustful = PageReader(allowed_networks=LOCAL, resolve=names(page__test=["127.0.0.1"]))
        with pytest.raises(PageError, match="CERTIFICATE_VERIFY_FAILED"):
            distrustful.read(f"https://page.test:{server.port}/")
    with serving(lambda asked: html_reply(ARTICLE), tls=theirs) as server:
        with pytest.raises(PageError, match="CERTIFICATE_VERIFY_FAILED"):
            reader.read(f"https://page.test:{server.port}/")
        assert server.asked == []


def test_size_is_limited_also_after_decompression() -> None:
    sent: list[int] = []

    def answer(asked: Asked) -> Reply:
        page = ARTICLE.encode() if asked.path == "/small" else b"a" * 50_000_000
        if asked.path == "/endless":
            return Reply(200, [b"b" * 65536] * 200, {"Content-Type": "text/plain"})
        body = zlib.compress(page) if asked.path == "/zlib" else gzip.compress(page, 1)
        sent.append(len(body))
        kind = "text/html" if asked.path == "/small" else "text/plain"
        coding = "deflate" if asked.path == "/zlib" else "gzip"
        return Reply(200, body, {"Content-Type": kind, "Content-Encoding": coding})

    reader = PageReader(allowed_networks=LOCAL, max_bytes=100_000)
    with serving(answer) as server:
        assert "Vistula" in reader.read(server.url + "/small")
        assert reader.read(server.url + "/bomb") == "a" * 100_000
        assert reader.read(server.url + "/zlib") == "a" * 100_000
        assert reader.read(server.url + "/endless") == "b" * 100_000
    assert max(sent) < 1_000_000


def test_time_is_limited_as_a_whole() -> None:
    """A piece every 0.1 seconds never runs into a limit of 0.5 between pieces."""

    def answer(asked: Asked) -> Reply:
        if asked.path == "/silent":
            return Reply(200, [b"<p>", 30.0], {"Content-Type": "text/html"})
        return Reply(200, [b"<p>", 0.1] * 300, {"Content-Type": "text/html"})

    reader = PageReader(allowed_networks=LOCAL, timeout=0.5)
    with serving(answer) as server:
        for path, reason in (("/slow", "not read in 0.5 seconds"), ("/silent", "not reached, ReadTimeout")):
            start = time.monotonic()
            with pytest.raises(PageError, match=reason):
                reader.read(server.url + path)
            assert time.monotonic() - start < 15


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (Reply(404), "the server answers 404"),
        (Reply(204), "the server answers 204"),
        (Reply(200, b"%PDF", {"Content-Type": "application/pdf"}), "no page of text, but application/pdf"),
        (Reply(200, b"", {"Content-Type": "text/html"}), "no text was found in the page"),
        (html_reply("<html><body></body></html>"), "no text was found"),
        (Reply(200, b"abc", {"Content-Encoding": "gzip"}), "broken compression"),
        (Reply(200, b"abc", {"Content-Encoding": "br"}), "compressed as br"),
        (html_reply("<" * 50_000), "no text"),
    ],
)
def test_what_is_no_page_of_text(reply: Reply, reason: str) -> None:
    with serving(lambda asked: reply) as server, pytest.raises(PageError, match=reason):
        PageReader(allowed_networks=LOCAL).read(server.url)


@pytest.mark.parametrize(
    "url", ["", "no address", "http://", "ftp://example.org/x", "http://a b/", "http://x:99999/"]
)
def test_malformed_addresses(url: str) -> None:
    with pytest.raises(PageError):
        PageReader(resolve=names()).read(url)


def test_hostile_html_costs_its_own_text_and_nothing_else() -> None:
    for html in (
        "<div>" * 20_000 + "text",
        "<table>" * 3000,
        "\x00\ud800<p>x",
        "<!DOCTYPE a [<!ENTITY b SYSTEM 'file:///etc/passwd'>]><p>&b;",
    ):
        try:
            assert "root:" not in text_of_html(html)
        except PageError as error:
            assert "no text can be taken out" in str(error)


def test_settings() -> None:
    reader = PageReader(timeout=3.0, allowed_networks=["10.0.0.0/8"])
    assert pickle.loads(pickle.dumps(reader)).settings == reader.settings
    with pytest.raises(UserError, match=r"allowed_networks: '10\.1' does not appear to be"):
        PageReader(allowed_networks=["10.1"])
    with pytest.raises(UserError, match="timeout must be more than 0"):
        PageReader(timeout=0)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trafilatura", None)
    with pytest.raises(UserError, match=r'needs trafilatura: pip install "mempo-gym\[web\]"'):
        PageReader()
