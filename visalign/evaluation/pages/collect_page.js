"use strict";
// One question after another: shows it, takes the answer by key, pointer or finger, and sends it until it is kept.
const one = (name) => document.querySelector(name), all = (name) => [...document.querySelectorAll(name)];
const chooses = document.body.dataset.choices === "1", words = all("[data-word]").map((word) => word.dataset.word);
const send = one("#send"), slider = one("#slider"), text = one("#text");
let now = null, ready = false, choice = null, graded = false, since = 0, busy = false, client = null;

const say = (message, wrong = false) => {
  one("#said").textContent = message;
  one("#said").classList.toggle("wrong", wrong);
};
const ask = async (place, body = {}) => {
  const answer = await fetch(place, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
  const found = await answer.json();
  if (!answer.ok) throw Object.assign(new Error(found.error), { status: answer.status });
  return found;
};
const patient = async (place, body) => {
  for (let wait = 500; ; wait = Math.min(2 * wait, 8000)) {
    try {
      return await ask(place, body);
    } catch (error) {
      if (error.status && error.status < 500) throw error;
      say("The server does not answer. Your answer is kept here and sent again.", true);
      await new Promise((done) => setTimeout(done, wait));
    }
  }
};

const choose = (side) => {
  choice = side;
  all("[data-choice]").forEach((button) => button.setAttribute("aria-pressed", button.dataset.choice === side));
  all("figure").forEach((figure) => figure.classList.toggle("chosen", side === figure.dataset.side || side === "tie"));
};
const grade = (value) => {
  graded = value !== null;
  if (graded) slider.value = value;
  const near = words[Math.round(slider.value) - 1], exact = slider.value % 1 === 0;
  one("#word").textContent = !graded ? "not set" : exact ? near : `between ${words[Math.floor(slider.value) - 1]} and ${words[Math.ceil(slider.value) - 1]}`;
  slider.setAttribute("aria-valuetext", one("#word").textContent);
};
const wait = (over) => {  // nobody answers what they have not seen, and the time counts from there
  ready = over;
  since = performance.now();
  one("#task").setAttribute("aria-busy", String(!over));
};
const show = (found) => {
  now = found.done ? null : found;
  one("#who").textContent = found.name;
  one("#link").href = found.link;
  one("#mine").hidden = false;
  one("#progress").max = Math.max(1, found.total);
  one("#progress").value = found.answered;
  one("#progress").title = `${found.answered} of ${found.total}`;
  one("#name").blur();  // what is hidden keeps the keys until the next frame is drawn
  one("#join").hidden = true;
  one("#end").hidden = !found.done;
  one("#task").hidden = Boolean(found.done);
  one(".act").hidden = false;
  all("[data-choice]").concat(send || []).forEach((button) => (button.disabled = Boolean(found.done)));
  one("#unseen").hidden = true;
  wait(Boolean(found.done));
  if (found.done) return;
  const before = found.answer || {};
  one("#prompt").textContent = found.prompt;
  all(".box").forEach((box) => box.remove());
  all("figure").forEach((figure) => {
    const image = figure.querySelector("img");
    image.onload = () => {  // as large as fits, small ones as squares
      image.style.width = `calc(62vh * ${image.naturalWidth / image.naturalHeight})`;
      image.classList.toggle("small", Math.max(image.naturalWidth, image.naturalHeight) <= 128);
    };
    image.src = found.images[figure.dataset.side];
  });
  choose(before.choice || null);
  if (slider) grade(before.slider ?? null);
  if (slider && !graded) slider.value = (words.length + 1) / 2;
  if (text) text.value = before.text || "";
  all(".check").forEach((check) => {
    const said = (before.checklist || {})[check.dataset.question];
    check.querySelector(`input[value="${said === undefined ? "" : said ? "yes" : "no"}"]`).checked = true;
  });
  (before.boxes || []).forEach(([side, ...ends]) => box(one(`figure[data-side="${side}"] .frame`), ends));
  client = null;
  say("");
  Promise.all(all("figure img").map((image) => image.decode())).then(
    () => now === found && wait(true),
    () => {
      if (now !== found) return;
      one("#unseen").hidden = false;
      say("An image cannot be shown. Go on by the button under it, and tell who asked you.", true);
    }
  );
};
const answer = () => {
  const found = {};
  if (chooses) found.choice = choice;
  if (slider && graded) found.slider = Number(slider.value);
  if (text && text.value.trim()) found.text = text.value.trim();
  const marks = all(".check").map((check) => [check.dataset.question, check.querySelector("input:checked").value]).filter(([, said]) => said);
  if (marks.length) found.checklist = Object.fromEntries(marks.map(([question, said]) => [question, said === "yes"]));
  const boxes = all(".box").map((box) => [box.closest("figure").dataset.side, ...box.ends]);
  if (boxes.length) found.boxes = boxes;
  return found;
};
const busily = async (work) => {
  if (busy) return;
  busy = true;
  try {
    await work();
  } catch (error) {
    if (error.status === 401) start();
    say(error.message, true);
  } finally {
    busy = false;
  }
};
const next = async () => show(await patient("/next"));
const keep = async (said) => {
  // One name for one answer, however often it is sent.
  client = client || Array.from(crypto.getRandomValues(new Uint32Array(4)), (part) => part.toString(16)).join("-");
  await patient("/vote", { client, assignment: now.assignment, answer: said, seconds: (performance.now() - since) / 1000 });
  await next();
};
const vote = () => busily(async () => {
  if (!now) return;
  if (!ready) return say("The images are still on their way.", true);
  if (chooses && !choice) return say("Choose an image first.", true);
  if (slider && !graded) return say("Set the slider first.", true);
  await keep(answer());
});
const back = () => busily(async () => show(await ask("/back", { assignment: now ? now.assignment : null })));

const box = (frame, ends) => {
  const made = Object.assign(document.createElement("div"), { className: "box", tabIndex: 0, ends });
  made.setAttribute("role", "img");
  made.setAttribute("aria-label", "Box around a fault");
  const place = () => {
    const [left, top, right, bottom] = made.ends.map((end) => 100 * end);
    Object.assign(made.style, { left: `${left}%`, top: `${top}%`, width: `${right - left}%`, height: `${bottom - top}%` });
  };
  made.move = (ends) => {
    made.ends = ends;
    place();
  };
  made.onkeydown = (event) => {
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (event.key === "Delete" || event.key === "Backspace") made.remove();
    else if (!step) return;
    else {
      const [x, y] = step.map((part) => 0.02 * part), [left, top, right, bottom] = made.ends;
      const moved = event.shiftKey ? [left, top, Math.min(1, right + x), Math.min(1, bottom + y)] : [left + x, top + y, right + x, bottom + y];
      if (Math.min(...moved) >= 0 && Math.max(...moved) <= 1 && moved[2] - moved[0] > 0.01 && moved[3] - moved[1] > 0.01) made.move(moved);
    }
    event.preventDefault();
    event.stopPropagation();
  };
  place();
  frame.append(made);
  return made;
};
all(".add").forEach((button) => {
  const frame = button.closest("figure").querySelector(".frame");
  const share = (event) => {
    const area = frame.querySelector("img").getBoundingClientRect();
    return [(event.clientX - area.left) / area.width, (event.clientY - area.top) / area.height].map((part) => Math.min(1, Math.max(0, part)));
  };
  frame.classList.add("drawing");
  frame.onpointerdown = (event) => {
    if (event.button || event.target.className === "box") return;
    const start = share(event), made = box(frame, [...start, ...start]);
    frame.setPointerCapture(event.pointerId);
    frame.onpointermove = (event) => {
      const end = share(event);
      made.move([Math.min(start[0], end[0]), Math.min(start[1], end[1]), Math.max(start[0], end[0]), Math.max(start[1], end[1])]);
    };
    frame.onpointerup = frame.onpointercancel = () => {
      frame.onpointermove = frame.onpointerup = null;
      if (made.ends[2] - made.ends[0] < 0.01 || made.ends[3] - made.ends[1] < 0.01) made.remove();
    };
  };
  button.onclick = () => box(frame, [0.4, 0.4, 0.6, 0.6]).focus();
});

all("[data-choice]").forEach((button) => (button.onclick = () => {
  if (ready) choose(button.dataset.choice);
  if (!send) vote();
}));
if (send) send.onclick = vote;
one("#back").onclick = back;
one("#unseen").onclick = () => busily(async () => now && keep({ unseen: true }));
one("#leave").onclick = () => busily(async () => {
  await ask("/leave");
  start();
});
if (slider) slider.oninput = () => grade(Number(slider.value));
document.addEventListener("keydown", (event) => {
  if (one(".act").hidden || event.ctrlKey || event.metaKey || event.altKey || event.repeat) return;
  const typing = event.target.matches("textarea, input[type=text]"), set = event.target.matches("input");
  if (typing && event.key !== "Escape") return;
  if (typing) return event.target.blur();
  const side = { ArrowLeft: "left", ArrowRight: "right", ArrowDown: "tie" }[event.key] || event.key;
  if (chooses && one(`[data-choice="${CSS.escape(side)}"]`) && now && !set) {
    if (ready) choose(side);
    if (!send) vote();
  } else if (slider && now && Number(event.key) >= 1 && Number(event.key) <= words.length) grade(Number(event.key));
  else if (event.key === "Enter" && send && !event.target.matches("button")) vote();
  else if (event.key === "Backspace" && !set) back();
  else return;
  event.preventDefault();
});
const start = () => {
  all("#task, #end, .act, #mine, #unseen").forEach((part) => (part.hidden = true));
  one("#who").textContent = "";
  one("#join").hidden = false;
  one("#name").focus();
};
one("#join form").onsubmit = (event) => {
  event.preventDefault();
  busily(async () => {
    await ask("/join", { name: one("#name").value, invite: new URLSearchParams(location.search).get("invite") || "" });
    await next();
  });
};
busily(async () => {
  try {
    show(await ask("/next"));
  } catch (error) {
    if (error.status !== 401) throw error;
    start();
  }
});
