// Reads an OpenAPI description: endpoints, parameters, bodies and replies. Knows nothing of the page.

const MAX_DEPTH = 4; // of nested fields, because a type may contain itself

/** Every endpoint, in the order of the description. */
export function endpoints(spec) {
  const found = [];
  for (const [path, methods] of Object.entries(spec.paths ?? {})) {
    for (const [method, operation] of Object.entries(methods)) found.push(endpoint(spec, path, method, operation));
  }
  return found;
}

function endpoint(spec, path, method, operation) {
  const body = contentOf(operation.requestBody);
  const answers = Object.entries(operation.responses ?? {});
  return {
    id: `${method}${path.replaceAll(/[^\w]+/g, "-")}`.replace(/-$/, ""),
    tag: operation.tags?.[0] ?? "Other",
    method: method.toUpperCase(),
    path,
    summary: operation.summary ?? "",
    description: operation.description ?? "",
    parameters: (operation.parameters ?? []).map((each) => parameter(spec, each)),
    body: body && { fields: fieldsOf(spec, body), example: exampleOf(spec, body) },
    reply: fieldsOf(spec, contentOf(operation.responses?.["200"]) ?? {}),
    answers: answers.map(([status, each]) => ({ status, description: each.description ?? "" })),
  };
}

function contentOf(holder) {
  return holder?.content?.["application/json"]?.schema;
}

function parameter(spec, given) {
  const field = describe(spec, given.name, given.schema ?? {}, Boolean(given.required), 0);
  return { ...field, place: given.in, description: given.description ?? field.description };
}

function resolve(spec, schema) {
  const name = schema.$ref?.split("/").at(-1);
  return name ? (spec.components?.schemas?.[name] ?? {}) : schema;
}

/** The fields of an object, required ones first. */
function fieldsOf(spec, schema, depth = 0) {
  const { properties = {}, required = [] } = resolve(spec, schema);
  const found = Object.entries(properties).map(([name, each]) => describe(spec, name, each, required.includes(name), depth));
  return [...found.filter((each) => each.required), ...found.filter((each) => !each.required)];
}

function describe(spec, name, schema, required, depth) {
  const inner = depth < MAX_DEPTH ? objectIn(spec, schema) : null;
  return {
    name,
    required,
    type: typeWords(spec, schema),
    default: schema.default === undefined || schema.default === null ? null : JSON.stringify(schema.default),
    description: schema.description ?? "",
    isRefused: (schema.description ?? "").startsWith("Not available:"),
    fields: inner ? fieldsOf(spec, inner, depth + 1) : [],
  };
}

/** The object type of a field: the field itself, one of its alternatives, or the items of its list. */
function objectIn(spec, schema) {
  const found = resolve(spec, schema);
  if (found.properties) return found;
  if (found.items) return objectIn(spec, found.items);
  for (const each of found.anyOf ?? []) {
    const inner = objectIn(spec, each);
    if (inner) return inner;
  }
  return null;
}

const NUMBERS = { minimum: "at least", exclusiveMinimum: "more than", maximum: "at most", exclusiveMaximum: "less than" };

function typeWords(spec, schema) {
  if (schema.$ref) return typeWords(spec, { ...resolve(spec, schema), $ref: undefined });
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((each) => JSON.stringify(each)).join(" or ");
  if (schema.anyOf) {
    // what is converted to the type is on no field: the page's introduction tells
    const own = schema.anyOf.filter((each) => each.type !== "null" && !resolve(spec, each)["x-conversion"]);
    const kinds = own.map((each) => typeWords(spec, each));
    return [...new Set(kinds)].join(" or ");
  }
  if (schema.type === "array") return schema.items ? `list of ${many(typeWords(spec, schema.items))}` : "list";
  const limits = Object.entries(NUMBERS).filter(([key]) => key in schema).map(([key, words]) => `${words} ${schema[key]}`);
  return [schema.type ?? "anything", ...limits].join(", ").replace(", ", " ");
}

/** The plural of a type's name, as in "list of strings". */
function many(words) {
  return /^(string|integer|number|boolean|object)$/.test(words) ? `${words}s` : words;
}

/** The description's own example, or a body with the required fields. */
function exampleOf(spec, schema) {
  const found = resolve(spec, schema);
  const example = structuredClone(found.examples?.[0] ?? {});
  for (const name of found.required ?? []) example[name] ??= placeholder(spec, found.properties[name]);
  return example;
}

function placeholder(spec, schema) {
  const found = resolve(spec, schema);
  if (found.default !== undefined) return found.default;
  if (found.enum) return found.enum[0];
  if (found.anyOf) return placeholder(spec, found.anyOf[0]);
  if (found.properties) return exampleOf(spec, found);
  return { array: [], integer: 1, number: 1, boolean: true, object: {}, null: null }[found.type] ?? "…";
}
