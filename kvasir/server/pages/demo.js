// A demonstration with real requests: six questions about one text, a moment apart. A browser opens six connections.

import { models, storedKey, stream } from "./api.js";

const TEXT = `You answer questions about this text. Kvasir is the wisest of beings in the Norse tales. When the two families
of gods made peace, all of them spat into a vat, and of what was in it they made a man so wise that nobody could ask him
anything he did not know. He travelled far through the world to teach people. Two dwarves, Fjalar and Galar, invited him,
killed him, and let his blood run into two vats and a kettle. They mixed it with honey, and it became the mead of poetry:
whoever drinks of it becomes a poet or a scholar. To the gods the dwarves said that Kvasir had drowned in his own wisdom,
because nobody was learned enough to ask him all he knew. The giant Suttung took the mead from them, and Odin stole it
from him in the shape of an eagle; the few drops he lost on his flight are what bad poets drink.`.replaceAll("\n", " ");
const QUESTIONS = [
  "Who was Kvasir?",
  "How was he made?",
  "Who killed him?",
  "What did they make of his blood?",
  "Who took the mead from them?",
  "What do bad poets drink?",
];

async function ask(model, question, key) {
  const messages = [{ role: "system", content: TEXT }, { role: "user", content: question }];
  const body = { model, messages, max_tokens: 160, temperature: 0.8, stream: true };
  for await (const _ of stream("v1/chat/completions", body, key)) {
    // the engine view shows the progress
  }
}

export async function shareAPrompt() {
  const key = storedKey();
  const [model] = await models(key);
  const asked = QUESTIONS.map(async (question, i) => {
    await new Promise((done) => setTimeout(done, 150 * i));
    await ask(model, question, key);
  });
  await Promise.allSettled(asked);
}
