(* The half of the verifier that is OCaml. ocaml_toplevel.py compiles it and runs it in the toplevel, where it prepares
   itself once and then forks: each request is answered by a process of its own, which ends with it.

   A request is either a problem, which is checked and whose expected values are computed, or an answer to one. No
   process sees both an answer and an expected value. *)

open Stdlib
open Parsetree

let longest = 4000 (* bytes of a printed value *)
let cpu_seconds = 0.5 (* for one request *)

(* What the toplevel would have printed about the last phrase. *)
let outcome = ref None

let silent = Format.make_formatter (fun _ _ _ -> ()) ignore

exception Raised

(* Types, compiles and runs items in the current scope, which they extend. A type error is an exception of its own. *)
let execute items =
  outcome := None;
  if not (Toploop.execute_phrase true silent (Ptop_def items)) then raise Raised

(* No directives: they are not part of the language, and reach into the toplevel. *)
let structure text =
  let items = function Ptop_def items -> items | Ptop_dir _ -> failwith "a directive" in
  List.concat_map items (!Toploop.parse_use_file (Lexing.from_string text))

let expression text =
  match structure text with
  | [ { pstr_desc = Pstr_eval (e, _); _ } ] -> e
  | _ -> failwith "this is not an expression"

(* What has no place in a text *)
let nowhere = (expression "()").pexp_loc
let item_of pstr_desc = { pstr_desc; pstr_loc = nowhere }
let module_of pmod_desc = { pmod_desc; pmod_loc = nowhere; pmod_attributes = [] }

(* The toplevel was started without the standard library in scope; answers may use all of it. *)
let clean =
  Toploop.initialize_toplevel_env ();
  Toploop.print_out_phrase := (fun _ phrase -> outcome := Some phrase);
  execute (structure "open Stdlib");
  !Toploop.toplevel_env

(* A value as text, so that equal texts mean equal values. What the toplevel cannot print in full has no text. *)

exception Unprintable

let rec printable = function
  | Outcometree.Oval_stuff _ | Oval_ellipsis | Oval_printer _ -> raise Unprintable
  | Oval_string (text, room, _) when String.length text > room -> raise Unprintable
  | Oval_float x when Float.is_nan x -> raise Unprintable
  | Oval_float x when x = 0. -> Outcometree.Oval_float 0. (* -0. is equal to it *)
  | Oval_array values -> Oval_array (List.map printable values)
  | Oval_list values -> Oval_list (List.map printable values)
  | Oval_tuple values -> Oval_tuple (List.map printable values)
  | Oval_constr (name, values) -> Oval_constr (name, List.map printable values)
  | Oval_record fields -> Oval_record (List.map (fun (name, value) -> name, printable value) fields)
  | Oval_variant (name, value) -> Oval_variant (name, Option.map printable value)
  | value -> value

let as_text print x =
  let text = Buffer.create 80 in
  let ppf = Format.formatter_of_buffer text in
  Format.pp_set_margin ppf 1_000_000;
  print ppf x;
  Format.pp_print_flush ppf ();
  if Buffer.length text > longest then raise Unprintable;
  Buffer.contents text

(* Evaluates an expression in the current scope. *)
let value_of e =
  execute [ item_of (Pstr_eval (e, [])) ];
  match !outcome with
  | Some (Outcometree.Ophr_eval (value, _)) -> as_text !Toploop.print_out_value (printable value)
  | _ -> raise Unprintable

(* Syntax trees, and the texts that they were read from *)

let text_at { Location.loc_start; loc_end; _ } text =
  String.sub text loc_start.pos_cnum (loc_end.pos_cnum - loc_start.pos_cnum)

let letter = function 'a' .. 'z' | 'A' .. 'Z' | '0' .. '9' | '_' | '\'' -> true | _ -> false

(* A text without the spaces that neither separate two words nor are in a string. *)
let spaced text =
  let shown = Buffer.create 80 and in_string = ref false and gap = ref false in
  let add i c =
    if c <= ' ' && not !in_string then gap := true
    else begin
      let before = Buffer.length shown - 1 in
      if !gap && before >= 0 && letter (Buffer.nth shown before) && letter c then Buffer.add_char shown ' ';
      gap := false;
      Buffer.add_char shown c;
      if c = '"' && (i = 0 || text.[i - 1] <> '\\') then in_string := not !in_string
    end
  in
  String.iteri add text;
  Buffer.contents shown

(* An expression without the parentheses around it. *)
let rec bare text =
  let text = String.trim text in
  let length = String.length text in
  if length < 2 || text.[0] <> '(' || text.[length - 1] <> ')' then text
  else
    let inner = String.sub text 1 (length - 2) in
    match expression inner with _ -> bare inner | exception _ -> text

let rec variable pattern =
  match pattern.ppat_desc with
  | Ppat_var name -> Some name.txt
  | Ppat_constraint (pattern, _) -> variable pattern
  | _ -> None

let defines name item =
  match item.pstr_desc with
  | Pstr_value (_, bindings) -> List.exists (fun b -> variable b.pvb_pat = Some name) bindings
  | _ -> false

(* A function and its arguments, if an expression applies one that has a plain name. *)
let applied e =
  match e.pexp_desc with
  | Pexp_apply ({ pexp_desc = Pexp_ident { txt = Longident.Lident f; _ }; _ }, arguments) -> f, List.map snd arguments
  | _ -> "", []

(* Whether a text has a word, be it in a string or a comment: what only looks like the function counts as well. *)
let has word text =
  let letter_at i = i >= 0 && i < String.length text && letter text.[i] in
  let length = String.length word in
  let rec from i =
    i + length <= String.length text
    && ((String.sub text i length = word && (not (letter_at (i - 1))) && not (letter_at (i + length))) || from (i + 1))
  in
  from 0

(* A problem *)

exception Left_out of string

let leave_out reason = raise (Left_out reason)

(* A problem as its definitions, its signature, and the name of the function. *)
let split problem =
  let items =
    try structure (problem ^ " assert false") with _ -> leave_out "its problem does not end with a signature and ="
  in
  match List.rev items with
  | ({ pstr_desc = Pstr_value (_, [ binding ]); _ } as last) :: _ ->
    let start = last.pstr_loc.loc_start.pos_cnum in
    let name =
      match variable binding.pvb_pat with
      | Some name -> name
      | None -> leave_out "its signature does not define a function"
    in
    String.sub problem 0 start, String.sub problem start (String.length problem - start), name, binding
  | _ -> leave_out "its problem does not end with a signature and ="

(* Whether a signature says the type of each argument and of the result. *)
let rec annotated e =
  match e.pexp_desc with
  | Pexp_fun (_, _, { ppat_desc = Ppat_constraint _ | Ppat_construct ({ txt = Lident "()"; _ }, None); _ }, body) ->
    annotated body
  | Pexp_newtype (_, body) -> annotated body
  | Pexp_constraint _ -> true
  | _ -> false

(* The type of a function among the values that the last phrase has defined, or those of its module type. *)
let type_of name =
  let of_item = function
    | Outcometree.Osig_value { oval_name; oval_type; _ } when oval_name = name -> Some oval_type
    | _ -> None
  in
  match !outcome with
  | Some (Outcometree.Ophr_signature [ (Osig_modtype (_, Omty_signature items), _) ]) ->
    as_text !Toploop.print_out_type (Option.get (List.find_map of_item items))
  | Some (Outcometree.Ophr_signature items) ->
    as_text !Toploop.print_out_type (Option.get (List.find_map of_item (List.map fst items)))
  | _ -> failwith "this defines nothing"

(* An answer is a definition of the function, perhaps with others around it, or the text that continues the signature.
   A type that the problem defines may be defined again: were it kept, it would be another type of the same name. *)
let items_of ~definitions ~signature ~name answer =
  match structure answer with
  | items when List.exists (defines name) items ->
    let given = List.map (fun item -> spaced (text_at item.pstr_loc definitions)) (structure definitions) in
    List.filter (fun item -> not (List.mem (spaced (text_at item.pstr_loc answer)) given)) items
  | _ | (exception _) -> structure (signature ^ "\n" ^ answer)

let comparisons = [ "="; "<>"; "=="; "!="; "<"; ">"; "<="; ">="; "||" ]

(* What an assertion evaluates, and what it expects. *)
let rec cases name tests e =
  let mentions e = has name (text_at e.pexp_loc tests) in
  let truth_of e wanted =
    if not (mentions e) then leave_out "an assertion does not call the function";
    if List.mem (fst (applied e)) comparisons then leave_out "an assertion compares in another way than with =";
    match e.pexp_desc with
    | Pexp_apply _ -> [ e, wanted ]
    | _ -> leave_out "an assertion is neither f ... = value nor a call"
  in
  match applied e with
  | "&&", [ a; b ] -> cases name tests a @ cases name tests b
  | "not", [ a ] -> truth_of a (expression "false")
  | "=", [ a; b ] ->
    let left, right = if mentions a then a, b else b, a in
    if mentions right then leave_out "an assertion calls the function on both sides";
    (match right.pexp_desc with
    | Pexp_construct ({ txt = Lident ("true" | "false"); _ }, _) -> truth_of left right
    | _ when mentions left -> [ left, right ]
    | _ -> leave_out "an assertion does not call the function")
  | _ -> truth_of e (expression "true")

let rec assertions e =
  match e.pexp_desc with
  | Pexp_sequence (a, b) -> assertions a @ assertions b
  | Pexp_assert e -> [ e ]
  | _ -> leave_out "its tests are not assertions alone"

let assertions_of_item item =
  match item.pstr_desc with
  | Pstr_eval (e, _) | Pstr_value (Nonrecursive, [ { pvb_expr = e; _ } ]) -> assertions e
  | _ -> leave_out "its tests are not assertions alone"

(* What a problem consists of, for Python: its definitions, its signature, the name and the type of the function, and
   whether the signature says that type; then for each assertion the left side, the expected value, and whether the
   problem shows it as an example. *)
let prepare problem tests solution examples =
  let definitions, signature, name, binding = split problem in
  (try execute (structure definitions) with _ -> leave_out "the definitions before its signature do not compile");
  let given = match binding.pvb_pat.ppat_desc with Ppat_constraint _ -> true | _ -> annotated binding.pvb_expr in
  let its_type =
    try
      if given then execute (structure (signature ^ " assert false"))
      else begin
        (* This types a solution and runs nothing of it. *)
        let solution = module_of (Pmod_structure (items_of ~definitions ~signature ~name solution)) in
        let its_type = { pmty_desc = Pmty_typeof solution; pmty_loc = nowhere; pmty_attributes = [] } in
        let pmtd_name = { Location.txt = "Solution"; loc = nowhere } in
        execute [ item_of (Pstr_modtype
          { pmtd_name; pmtd_type = Some its_type; pmtd_attributes = []; pmtd_loc = nowhere }) ]
      end;
      type_of name
    with _ -> leave_out "neither its signature nor a solution says the type of the function"
  in
  (try if not given then execute (structure (Printf.sprintf "let %s : %s = fun _ -> assert false" name its_type))
   with _ -> leave_out "it does not ask for a function");
  let items = try structure tests with _ -> leave_out "its tests do not parse" in
  if has "try" tests || has "exception" tests then
    leave_out "an assertion catches exceptions, so it expects the same value from every right answer";
  let shown = List.map (fun text -> spaced (bare text)) examples in
  let case (left, right) =
    (* The left side is typed, so that both have the same type, but never evaluated. *)
    let either = { left with pexp_desc = Pexp_ifthenelse (expression "false", left, Some right) } in
    let expected =
      try value_of either with
      | Unprintable | Raised -> leave_out "an expected value cannot be printed in full"
      | _ -> leave_out "an assertion does not have the type of the signature"
    in
    let text = bare (text_at left.pexp_loc tests) in
    [ text; expected; string_of_bool (List.mem (spaced text) shown) ]
  in
  let found = List.concat_map (cases name tests) (List.concat_map assertions_of_item items) in
  [ definitions; signature; name; its_type; string_of_bool given ] @ List.concat_map case found

(* An answer *)

(* A functor without arguments that yields the function, with the wanted type, of the items of an answer. The answer is
   put into the syntax tree, as text could close the functor. *)
let functor_of items name its_type =
  match structure (Printf.sprintf "module type Wanted = sig val %s : %s end" name its_type) with
  | [ { pstr_desc = Pstr_modtype { pmtd_type = Some wanted; _ }; _ } ] ->
    let typed = module_of (Pmod_constraint (module_of (Pmod_structure items), wanted)) in
    let pmb_name = { Location.txt = Some "Answer"; loc = nowhere } in
    let pmb_expr = module_of (Pmod_functor (Unit, typed)) in
    item_of (Pstr_module { pmb_name; pmb_expr; pmb_attributes = []; pmb_loc = nowhere })
  | _ -> failwith its_type

(* `put` tells how far the answer came: "parses", then "typed", then a frame for each left side, then "end". The answer
   is the body of a functor, so it is typed and compiled before any of it runs, and its function is all that the left
   sides can see of it: they mean what they meant to the author of the tests, whatever the answer has redefined. *)
let judge put definitions signature name its_type answer lefts =
  execute (structure definitions);
  let items = items_of ~definitions ~signature ~name answer in
  put "parses";
  execute [ functor_of items name its_type ];
  put "typed";
  execute (structure "include Answer ()");
  let scope = !Toploop.toplevel_env in
  let show left =
    Toploop.toplevel_env := scope;
    put (match value_of (expression left) with text -> "=" ^ text | exception _ -> "!")
  in
  List.iter show lefts;
  put "end"

(* Processes *)

let rec parts = function
  | [] -> []
  | length :: rest ->
    let part = really_input_string stdin (int_of_string length) in
    part :: parts rest

(* What a forked process does. `own` tells the process that it was forked from when the request has been read, and by
   its end when this process ends. What is found goes straight to Python, through the file whose number Python names:
   no other process of OCaml, and so no later answer, has it in its memory. What an answer prints goes nowhere. *)
let answer_request own =
  match parts (String.split_on_char ';' (read_line ())) with
  | [] | [ _ ] -> failwith "this is not a request"
  | number :: request ->
    ignore (Unix.write_substring own "." 0 1);
    Unix.dup2 Unix.stderr Unix.stdout;
    Unix.close Unix.stdin;
    let to_python : Unix.file_descr = Obj.magic (int_of_string number) in
    let put text =
      let frame = Printf.sprintf "%d\n%s" (String.length text) text in
      ignore (Unix.write_substring to_python frame 0 (String.length frame))
    in
    ignore Unix.(setitimer ITIMER_PROF { it_interval = 0.; it_value = cpu_seconds });
    match request with
    | "answer" :: definitions :: signature :: name :: its_type :: answer :: lefts ->
      (try judge put definitions signature name its_type answer lefts with _ -> ())
    | "problem" :: problem :: tests :: solution :: examples ->
      List.iter put (match prepare problem tests solution examples with
        | fields -> "problem" :: fields
        | exception Left_out reason -> [ "left out"; reason ]
        | exception _ -> [ "left out"; "it cannot be checked" ])
    | _ -> failwith "this is not a request"

(* Waits until a process ends or uses its end of a pipe, nine seconds at most. Tenths of seconds are counted, so that a
   machine that sleeps does not make it late. *)
let rec wait_for pipe tenths =
  if tenths > 0 && Unix.select [ pipe ] [] [] 0.1 = ([], [], []) then wait_for pipe (tenths - 1)

(* Each process is forked before its request comes. Python is told whether it ended by itself. *)
let rec serve () =
  let pipe, own = Unix.pipe () in
  match Unix.fork () with
  | 0 ->
    Unix.close pipe;
    answer_request own;
    Unix._exit 0
  | child ->
    Unix.close own;
    if Unix.read pipe (Bytes.create 1) 0 1 = 1 then begin
      wait_for pipe 90;
      Unix.kill child Sys.sigkill;
      let _, status = Unix.waitpid [] child in
      Unix.close pipe;
      print_endline (match status with Unix.WEXITED _ -> "ended" | _ -> "killed");
      serve ()
    end

let () =
  Toploop.max_printer_depth := 200;
  Toploop.max_printer_steps := 500; (* parts of a value; thousands would take as long as a program may *)
  (* What the compiler loads and computes for a first program need not be loaded again by each process. *)
  execute (structure {|
    module M = Map.Make (String)
    module S = Set.Make (Int)
    let _ = List.map, Array.map, Hashtbl.find, Printf.sprintf "%d", String.sub, Char.code, Option.map, Buffer.add_char
    let _ = Bytes.get, Seq.map, Float.abs, Queue.add, Stack.push, Fun.id, Result.map, Int.max, Bool.not, Lazy.force|});
  ignore (value_of (expression "[ Some 1.5, \"a\" ]"));
  Toploop.toplevel_env := clean;
  (* A page that a fork changes is copied first, and a garbage collection changes most of them. It would begin when half
     of the minor heap is full, but a program of ordinary length takes less. A fork also copies the table of all pages,
     so the major heap is made as small as possible. *)
  Gc.(set { (get ()) with minor_heap_size = 1_000_000; space_overhead = 1 });
  Gc.compact ();
  Gc.(set { (get ()) with space_overhead = 1000 });
  (match Unix.fork () with 0 -> Unix._exit 0 | child -> ignore (Unix.waitpid [] child));
  print_endline "ready";
  serve ()
