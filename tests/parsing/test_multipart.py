import pytest

from extproc.parsing import model_edit, other_apis
from tests.parsing import builders

PATH = "/v1/audio/transcriptions"
SOUND = bytes(range(256)) * 100 + b"\r\n--other\r\n\r\n"


def part(name, content, extra=b""):
    head = b'--XX\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n' % (name, extra)
    return head + content + b"\r\n"


FILE = part(b"file", SOUND, b'; filename="model.wav"\r\nContent-Type: audio/wav')


def form(body, path=PATH, content_type="multipart/form-data; boundary=XX"):
    return builders.parsed(path, body, content_type=content_type)


@pytest.mark.parametrize("order", [1, -1])
def test_fields(order):
    """Fields are read before and behind the file; the file is not."""
    parts = [FILE, part(b"model", b"whisper"), part(b"prompt", b"names"), part(b"stream", b"true")]
    request = form(b"".join(parts[::order]) + b"--XX--\r\n")
    assert (request.api, request.model, request.stream) == ("transcriptions", "whisper", True)
    assert (request.prompt, request.prompt_tokens) == (b"names", 1)


@pytest.mark.parametrize(
    ("path", "api"),
    [
        ("/v1/audio/translations", "translations"),
        ("/v1/images/edits", "image_edits"),
        ("/v1/images/variations", "image_variations"),
    ],
)
def test_other_forms(path, api):
    """Translations, edits and variations are forms as well, whose model can be replaced."""
    body = FILE + part(b"model", b"w") + b"--XX--"
    content_type = "multipart/form-data; boundary=XX"
    request = form(body, path=path)
    assert (request.api, request.model) == (api, "w")
    edit = model_edit.locate_model(builders.post(path, body, content_type=content_type), "new")
    assert edit is not None
    assert edit.apply(body) == FILE + part(b"model", b"new") + b"--XX--"


@pytest.mark.parametrize(
    "content_type",
    [
        'multipart/form-data; boundary="XX"',
        "Multipart/Form-Data; Boundary=XX; charset=utf-8",
        "multipart/form-data;x-boundary=YY;boundary=XX",
    ],
)
def test_boundary_forms(content_type):
    """The boundary may be quoted, in any case, and beside other parameters."""
    assert form(part(b"model", b"w") + b"--XX--", content_type=content_type).model == "w"


def test_names_without_quotes():
    """Some clients do not quote names, and put other parameters first."""
    body = b"--XX\r\nContent-Type: text/plain\r\ncontent-disposition: form-data; a=b; name=model"
    assert form(body + b"\r\n\r\nw\r\n--XX--").model == "w"


def test_file_name_is_not_a_name():
    """A file named `model` is not the model."""
    body = part(b"file", b"w", b'; filename="model"').replace(b'name="file"; ', b"")
    assert form(body + b"--XX--").model == ""


def test_text_of_a_file_name_is_not_a_name():
    """Nor is what a quoted file name has behind a semicolon; the real name comes after it."""
    file = part(b"file", SOUND, b"").replace(b"name=", b'filename="take; name=model"; name=')
    assert form(file + part(b"model", b"w") + b"--XX--").model == "w"
    assert form(file + b"--XX--").model == ""


def test_parts_behind_the_end_are_not_read():
    """As engines ignore them."""
    assert form(part(b"model", b"w") + b"--XX--\r\n" + part(b"model", b"other")).model == "w"


@pytest.mark.parametrize(
    "body",
    [
        b"x",
        b"--XX",
        b"--XX\r\n\r\n",
        b"--XX--",
        FILE,
        part(b"model", b"w" * 9000),
        b"\r\n--XX" * 99,
    ],
)
def test_forms_without_a_model(body):
    """A form that cannot be read is routed without a model."""
    assert form(body).model == ""


def test_model_of_a_cut_form():
    """The part before the cut is read."""
    assert form(part(b"model", b"w") + FILE[:500]).model == "w"


def test_a_line_that_goes_on_after_the_boundary_is_content():
    """The boundary is XX; white space may follow it, and other text makes a line of the content."""
    content = b"a\r\n--XXL\r\ncontent-disposition: form-data; name=model\r\n\r\nother"
    body = part(b"model", b"w") + part(b"prompt", content) + b"--XX \r\n" + b"--XX--\r\n"
    request = form(body)
    assert (request.model, request.prompt) == ("w", content)


def test_parts_are_bounded():
    """Only so many parts are looked at."""
    many = part(b"x", b"y") * other_apis.MAX_PARTS
    assert form(many + part(b"model", b"w")).model == ""


def test_json_on_an_audio_path():
    """A body that is no form is read like any other small JSON."""
    request = builders.parsed(PATH, {"model": "w"}, content_type="application/json")
    assert (request.api, request.model) == ("transcriptions", "w")


def test_session_of_a_form():
    """A header overrules the user field."""
    body = part(b"user", b"u") + b"--XX--"
    assert form(body).session == "u"
    content_type = "multipart/form-data; boundary=XX"
    request = builders.parsed(PATH, body, content_type=content_type, x_session_id="s")
    assert request.session == "s"
